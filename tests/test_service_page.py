"""The pages in a real browser. It runs where Chromium and its driver are installed."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from served import on_loopback

from vramcast.collocation.service.settings import Settings

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
WORDS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,1000",
)  # fmt: skip
AXE = os.environ.get("VRAMCAST_AXE")
"""The path of axe.min.js of axe-core, which is not part of the repository."""
RESNET = "?target=timm:resnet18&batch_size=8&side=64&device=t4"

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no browser here: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for word in (*WORDS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with on_loopback(Settings(port=0, log_requests=False)) as address:
        yield address


def until(browser: Any, condition: Callable[[Any], Any], seconds: float = 40) -> None:
    WebDriverWait(browser, seconds, poll_frequency=0.1).until(condition)


def text(browser: Any, name: str) -> str:
    return str(browser.find_element(By.ID, name).get_property("textContent"))


def opened(browser: Any, url: str) -> None:
    browser.get(url)
    until(browser, lambda page: len(Select(page.find_element(By.ID, "device")).options) > 10)


def quiet(browser: Any) -> None:
    severe = [entry["message"] for entry in browser.get_log("browser") if " 422 " not in entry["message"]]
    assert [message for message in severe if " 401 " not in message] == []


def serious(browser: Any) -> list[str]:
    """Return the serious findings of axe-core on the page."""
    if not AXE:
        return []
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    browser.execute_script(Path(AXE).read_text(encoding="utf-8"))
    found = browser.execute_async_script("const done = arguments[0]; axe.run().then(done)")["violations"]
    return [
        f"{item['id']}: {item['nodes'][0]['target']}" for item in found if item["impact"] in ("serious", "critical")
    ]


def emulate(browser: Any, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def test_the_answer_follows_the_form(browser: Any, url: str) -> None:
    opened(browser, url + RESNET)
    until(browser, lambda page: "Simulated" in text(page, "source") or "Learned" in text(page, "source"))
    until(browser, lambda page: len(page.find_elements(By.CSS_SELECTOR, "#cards li")) > 10)
    assert text(browser, "verdict") == "It fits"
    assert "T4" in text(browser, "summary")
    assert "fits" in browser.find_element(By.CSS_SELECTOR, "#cards li.chosen").text
    assert text(browser, "problem") == ""
    assert "batch_size=8" in text(browser, "copies")
    before = text(browser, "summary")
    browser.execute_script(
        "const slider = document.getElementById('batch-slider'); slider.value = slider.max;"
        "slider.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert browser.find_element(By.ID, "batch_size").get_attribute("value") == "4096"
    until(browser, lambda page: text(page, "summary") != before)
    until(browser, lambda page: not page.find_elements(By.CSS_SELECTOR, ".stale"))
    assert "batch_size=4096" in browser.current_url
    assert "--batch-size 4096" in text(browser, "copies")
    quiet(browser)


def test_a_network_is_chosen_by_keyboard(browser: Any, url: str) -> None:
    opened(browser, url + RESNET)
    field = browser.find_element(By.ID, "target")
    field.click()
    field.send_keys(Keys.CONTROL, "a")
    until(browser, lambda page: page.execute_script("return document.getElementById('options').children.length") > 0)
    field.send_keys("resnet34")
    until(browser, lambda page: "resnet34" in text(page, "options"))
    assert field.get_attribute("aria-expanded") == "true"
    field.send_keys(Keys.ARROW_DOWN)
    chosen = browser.find_element(By.ID, field.get_attribute("aria-activedescendant"))
    assert chosen.get_attribute("aria-selected") == "true"
    assert chosen.get_attribute("data-name") == "timm:resnet34"
    field.send_keys(Keys.ENTER)
    assert field.get_attribute("value") == "timm:resnet34"
    assert field.get_attribute("aria-expanded") == "false"
    until(browser, lambda page: "timm:resnet34" in text(page, "copies"))
    quiet(browser)


def test_a_link_opens_the_same_job_and_shows_its_fields(browser: Any, url: str) -> None:
    opened(browser, url + "?target=hf:nothing&batch_size=3&length=256&lora=true&rank=8&quantize=nf4&device=t4")
    assert browser.find_element(By.ID, "lora").is_selected()
    assert browser.find_element(By.ID, "rank").is_displayed()
    assert browser.find_element(By.ID, "length").is_displayed()
    assert not browser.find_element(By.ID, "side").is_displayed()
    assert "lora=r=8,targets=all-linear quantize=nf4" in text(browser, "copies")
    until(browser, lambda page: "expected one of" in text(page, "problem"))
    assert text(browser, "verdict") == "No answer"


def test_what_was_sent_is_text_and_never_markup(browser: Any, url: str) -> None:
    opened(browser, url + "?target=timm:%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E&batch_size=1")
    until(browser, lambda page: "expected" in text(page, "problem"))
    assert "<img src=x" in text(browser, "copies")
    assert browser.find_elements(By.CSS_SELECTOR, "main img") == []
    browser.execute_script("document.querySelector('details').open = true")
    box = browser.find_element(By.ID, "own")
    for words, problem in (
        ("{", "Expected JSON"),
        ("resnet50", "operator prepared"),
        ('{"family": "mlp"}', "expected"),
    ):
        box.clear()
        box.send_keys(words)
        browser.find_element(By.ID, "ask").click()
        until(browser, lambda page, problem=problem: problem in text(page, "problem"))
    policy = "const a = document.createElement('script'); a.textContent = 'window.ran = 1'; document.head.append(a)"
    browser.execute_script(policy)
    assert browser.execute_script("return window.ran") is None, "the policy forbids a script in the page"
    browser.get_log("browser")


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_nothing_is_cut_off_and_axe_finds_nothing_serious(browser: Any, url: str, width: int, scheme: str) -> None:
    emulate(browser, width, scheme)
    for page in (RESNET, "/operations"):
        browser.get(url + page)
        if page == RESNET:
            until(browser, lambda found: len(found.find_elements(By.CSS_SELECTOR, "#cards li")) > 10)
        else:
            until(browser, lambda found: "ready" in text(found, "tiles"))
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert ("rgb(14," in background) == (scheme == "dark")
        assert serious(browser) == []


def test_the_token_is_asked_for(browser: Any) -> None:
    with on_loopback(Settings(port=0, log_requests=False, token="secret")) as address:
        browser.get(address + RESNET)
        token = browser.find_element(By.ID, "token")
        until(browser, lambda _: token.is_displayed())
        token.send_keys("secret\t")
        until(browser, lambda page: text(page, "verdict") == "It fits")
