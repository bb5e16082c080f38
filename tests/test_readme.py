"""The commands of the README run as they stand, one after the other."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BIN = Path(sys.executable).parent


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(".venv/bin/")]


def test_the_commands_of_the_readme_run(tmp_path):
    found = commands()
    assert len(found) >= 9
    for program, *words in found:
        command = [BIN / Path(program).name, *words]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, (command, result.stderr)
    assert {"rows", "row.py"} == {path.name for path in tmp_path.iterdir()}


def test_the_factors_of_the_readme_can_be_changed(tmp_path):
    changes = re.findall(r"`([^`]*space\.factors[^`]+)`", README.read_text())
    assert len(changes) == 2
    for number, change in enumerate(changes):
        words = ["build", *shlex.split(change), "n=3", "executor=serial", f"out={tmp_path / str(number)}"]
        result = subprocess.run([BIN / "vramcast", *words], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
