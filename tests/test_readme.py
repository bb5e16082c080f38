"""The commands of the README, of docs/building.md and of docs/service.md run, one after the other."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from pages import DOCS, README, blocks

import vramcast.cli

BUILDING, SERVICE = DOCS / "building.md", DOCS / "service.md"
BIN = Path(sys.executable).parent
SHOWN_LINES = 12


def commands(page: Path) -> list[list[str]]:
    """Return the commands in the blocks of a page, without the directory of the program."""
    lines = [
        shlex.split(line.removeprefix(".venv/bin/"), comments=True)
        for block in blocks(page)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [words for words in lines if words and words[0] in ("vramcast", "python")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in an empty directory; in this process, which has imported torch already."""
    monkeypatch.chdir(tmp_path)

    def run(words: list[str]) -> int:
        if words[0] == "vramcast":
            monkeypatch.setattr(sys, "argv", words)
            return vramcast.cli.main()
        return subprocess.run([BIN / words[0], *words[1:]], check=False).returncode

    return run


def test_the_commands_of_the_readme_run_and_print_what_it_shows(run, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PATH", str(BIN), prepend=os.pathsep)
    monkeypatch.setenv("COLUMNS", "100")  # what a command assumes without a terminal; libraries set it to less
    (tmp_path / "train.py").write_text(blocks(README, "python")[0])
    chosen = commands(README)
    assert [words[:2] for words in chosen] == [["vramcast", name] for name in ("classify", "classify", "run")]
    outputs = []
    for words in chosen:
        assert run(words) == 0, (words, capfd.readouterr().err)
        outputs.append(capfd.readouterr().out)
    assert all("FITS" in output for output in outputs)
    shown = blocks(README, "text")[0].splitlines()
    assert len(shown) == SHOWN_LINES
    assert _without_versions(shown) == _without_versions(outputs[0].splitlines()[:SHOWN_LINES])


def _without_versions(lines: list[str]) -> list[str]:
    """Return lines without the releases that a network was traced with, which differ between environments."""
    return [re.sub(r"(torch|timm) [\w.+]+", r"\1", line) for line in lines]


def test_the_readme_installs_what_its_commands_need():
    (install,) = re.findall(r"^pip install '\.\[(.+)\]'$", README.read_text(), re.MULTILINE)
    targets = [word.partition(":")[0] for words in commands(README) for word in words if ":" in word]
    assert set(install.split(",")) == set(targets) == {"timm", "hf"}


def test_the_python_code_of_the_readme_prints_what_it_shows(capsys):
    _, code = blocks(README, "python")
    exec(compile(code, "README.md", "exec"), {})
    shown = blocks(README, "text")[1].splitlines()
    assert len(shown) == 3
    assert capsys.readouterr().out.splitlines()[:3] == shown


def test_the_command_that_places_a_job_runs(run, tmp_path, capfd):
    (tmp_path / "job.json").write_text(blocks(SERVICE, "json")[0])
    (placed,) = [words for words in commands(SERVICE) if words[1] == "place"]
    assert run(placed) == 0
    assert capfd.readouterr().out.strip() == "1"


def test_the_service_answers(tmp_path):
    words = next(words for words in commands(SERVICE) if words[1] == "serve")
    command = [sys.executable, "-m", "vramcast", *words[1:], "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = next(json.loads(line)["port"] for line in process.stderr if '"port"' in line)
            _wait_until_ready(port)
            body = b'{"spec": %s}' % blocks(SERVICE, "json")[0].encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/classify", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert json.load(reply)["fits"] is True
        finally:
            process.terminate()


def _wait_until_ready(port: int) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the service did not become ready")


@pytest.mark.slow
def test_the_commands_of_the_page_on_building_run(run, tmp_path, capfd):
    chosen = commands(BUILDING)
    assert len(chosen) >= 9
    for words in chosen:
        assert run(words) == 0, (words, capfd.readouterr().err)
        output = capfd.readouterr().out
    assert {"rows", "row.py", "runs"} == {path.name for path in tmp_path.iterdir()}
    assert "this run" in output


def test_the_factors_of_the_page_on_building_can_be_changed(run, tmp_path):
    changes = re.findall(r"`([^`]*space\.factors[^`]+)`", BUILDING.read_text())
    assert len(changes) == 2
    for number, change in enumerate(changes):
        assert run(["vramcast", "build", *shlex.split(change), "n=3", "executor=serial", f"out=rows/{number}"]) == 0
