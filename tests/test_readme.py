"""The commands of the README and of docs/building.md run, one after the other."""

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

BUILDING = DOCS / "building.md"
BIN = Path(sys.executable).parent
NEEDS_A_GPU = ("verify", "calibrate")
SCRIPT = """
import torch
network = torch.nn.Linear(8, 2).cuda()
optimizer = torch.optim.AdamW(network.parameters())
for _ in range(3):
    network(torch.randn(4, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def commands(page: Path) -> list[list[str]]:
    """Return the commands in the blocks of a page, without the directory of the program."""
    lines = [
        shlex.split(line.removeprefix(".venv/bin/"), comments=True)
        for block in blocks(page)
        for line in block.splitlines()
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


def test_the_commands_of_the_readme_run(run, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PATH", str(BIN), prepend=os.pathsep)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "net.py").write_text(blocks(README, "python")[0])
    (tmp_path / "job.json").write_text(blocks(README, "json")[0])
    chosen = [words for words in commands(README) if words[1] != "serve" and words[2] not in NEEDS_A_GPU]
    assert [words[1] for words in chosen] == ["run", "classify", "classify", "build", "train", "place"]
    outputs = []
    for words in chosen:
        assert run(words) == 0, (words, capfd.readouterr().err)
        outputs.append(capfd.readouterr().out)
    assert all("FITS" in output for output in outputs[:3])
    assert "24 rows" in outputs[3]
    assert "this run" in outputs[4]
    assert outputs[5].strip() == "1"


def test_the_python_code_of_the_readme_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    network, code = blocks(README, "python")
    (tmp_path / "net.py").write_text(network)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    (shown,) = blocks(README, "text")
    assert capsys.readouterr().out.startswith(shown.strip("\n"))


def test_the_service_of_the_readme_answers(tmp_path):
    (words,) = [words for words in commands(README) if words[1] == "serve"]
    command = [sys.executable, "-m", "vramcast", *words[1:], "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = next(json.loads(line)["port"] for line in process.stderr if '"port"' in line)
            _wait_until_ready(port)
            body = b'{"spec": %s}' % blocks(README, "json")[0].encode()
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


def test_the_commands_of_the_page_on_building_run(run, tmp_path, capfd):
    chosen = commands(BUILDING)
    assert len(chosen) >= 9
    for words in chosen:
        assert run(words) == 0, (words, capfd.readouterr().err)
    assert {"rows", "row.py"} == {path.name for path in tmp_path.iterdir()}


def test_the_factors_of_the_page_on_building_can_be_changed(run, tmp_path):
    changes = re.findall(r"`([^`]*space\.factors[^`]+)`", BUILDING.read_text())
    assert len(changes) == 2
    for number, change in enumerate(changes):
        assert run(["vramcast", "build", *shlex.split(change), "n=3", "executor=serial", f"out=rows/{number}"]) == 0
