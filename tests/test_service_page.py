"""The page in a real browser."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait
from served import on_loopback

from vramcast.collocation.service.settings import Settings

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no browser here: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1100"):
        options.add_argument(word)
    response = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield response
    response.quit()


def asked(browser: Any) -> None:
    browser.find_element(By.ID, "ask").click()
    WebDriverWait(browser, 30).until(lambda page: page.find_element(By.ID, "ask").is_enabled())


def text(browser: Any, name: str) -> str:
    return str(browser.find_element(By.ID, name).text)


def opened(browser: Any, url: str) -> None:
    browser.get(url)
    WebDriverWait(browser, 10).until(lambda page: page.execute_script("return document.readyState") == "complete")


def test_the_page_answers_a_job(browser: Any) -> None:
    with on_loopback(Settings(port=0, log_requests=False)) as url:
        opened(browser, url)
        WebDriverWait(browser, 10).until(lambda page: len(Select(page.find_element(By.ID, "device")).options) > 10)
        Select(browser.find_element(By.ID, "device")).select_by_value("t4")
        asked(browser)
        assert text(browser, "problem") == ""
        assert text(browser, "verdict") == "It fits"
        assert "NVIDIA T4" in text(browser, "summary")
        assert "Largest batch" in text(browser, "figures")
        assert "%" in text(browser, "distribution")
        cards = browser.find_elements(By.CSS_SELECTOR, "#cards > div")
        assert len(cards) > 10
        assert {card.get_attribute("class") for card in cards} == {"fits"}

        box = browser.find_element(By.ID, "job")
        for words, told in (("{", "no JSON"), ("resnet50", "operator prepared"), ('{"family": "mlp"}', "expected")):
            box.clear()
            box.send_keys(words)
            asked(browser)
            assert told in text(browser, "problem")
        assert Select(browser.find_element(By.ID, "example")).first_selected_option.text == "My own"
        box.clear()
        box.send_keys('{"name": "<img src=x onerror=alert(1)>"}')
        asked(browser)
        assert "<img" in text(browser, "problem"), "what was sent is text, never markup"
        severe = [entry for entry in browser.get_log("browser") if "422" not in entry["message"]]
        assert severe == [], "and the console is quiet"


def test_the_token_is_asked_for(browser: Any) -> None:
    with on_loopback(Settings(port=0, log_requests=False, token="secret")) as url:
        opened(browser, url)
        token = browser.find_element(By.ID, "token")
        WebDriverWait(browser, 10).until(lambda _: token.is_displayed())
        token.send_keys("secret\t")
        WebDriverWait(browser, 10).until(lambda page: len(Select(page.find_element(By.ID, "device")).options) > 10)
        asked(browser)
        assert text(browser, "verdict") == "It fits"
