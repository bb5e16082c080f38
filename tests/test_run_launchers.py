"""`vramcast run` of what starts a script: shell scripts, notebooks, uv, variables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_runs import SCRIPTS

from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.simulation.scripts.client import RunOptions, run_script
from vramcast.simulation.scripts.command_line import parse_command
from vramcast.simulation.scripts.notebooks import notebook_source
from vramcast.simulation.scripts.shell_scripts import training_command


def loaded_bytes(words):
    """Run a command; return what it holds after its network was loaded."""
    report = run_script(parse_command(words), load_profile("a100_40gb"), [], RunOptions())
    assert report.failure is None, report.traceback
    assert len(report.steps) == 4
    print({item.phase: item.allocated_bytes for item in report.phases})
    return next(item.allocated_bytes for item in report.phases if item.phase == "loading")


def linear(inputs, outputs):
    return 4 * (inputs * outputs + outputs)


def test_a_shell_script_is_read_and_changes_nothing(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # it runs "python"
    before = sorted(SCRIPTS.iterdir())
    small = loaded_bytes(["bash", "-e", str(SCRIPTS / "launched.sh"), "--batch", "16"])
    assert small == 2 * linear(512, 512) + 4 * 16 * 512, "two layers and the first batch"
    large = loaded_bytes(["WIDTH=1024", str(SCRIPTS / "launched.sh")])
    assert large == 2 * linear(1024, 1024) + 4 * 8 * 1024
    assert sorted(SCRIPTS.iterdir()) == before, "neither the logs nor the directory"


def test_a_notebook_runs_with_the_parameters_of_papermill():
    notebook = str(SCRIPTS / "launched.ipynb")
    words = ["jupyter", "nbconvert", "--to", "notebook", "--execute", notebook]
    assert loaded_bytes(words) == linear(8, 1024) + 4 * 64 * 8
    assert (
        loaded_bytes(["papermill", notebook, "out.ipynb", "-p", "width", "1024"]) == linear(1024, 1024) + 4 * 64 * 1024
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python train.py --lr 1e-4", ["python", "train.py", "--lr", "1e-4"]),
        ("LR=3\npython train.py --lr $LR --x '$LR' --y \"${LR}e-1\"", ["--lr", "3", "--x", "$LR", "--y", "3e-1"]),
        ('python train.py "a b" $@ "$@" "$1"', ["a b", "first", "a", "second", "first", "a second", "first"]),
        ('ARGS="--a 1"; python train.py $ARGS "$ARGS"', ["--a", "1", "--a 1"]),
        ("python train.py \\\n  --a 1 \\\n  --b 2 2>&1 | tee x.log", ["--a", "1", "--b", "2"]),
        ("python train.py --out ${OUT:-'a'} > log.txt 2> err.txt &", ["--out", "a"]),
        ("A=(1 2\n 3)\npython train.py ${A[@]}", ["1", "2", "3"]),
        ("# python no.py\nif true; then python train.py --n $#; fi", ["--n", "2"]),
        ("nohup python train.py --d $(basename /x/y)-$(echo 1) &", ["--d", "y-1"]),
        ("python train.py --url http://x#y --z a=b", ["--url", "http://x#y", "--z", "a=b"]),
    ],
)
def test_a_shell_would_pass_the_same_words(text, words, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(text)
    found = training_command(path, ["first", "a second"], lambda word: word == "python").words
    assert found[-len(words) :] == words
    shell = f'python() {{ printf \'%s\\n\' python "$@" >&3; }}; nohup() {{ "$@"; }}\n{text}\nwait'
    ran = subprocess.run(
        ["bash", "-c", f"exec 3>{tmp_path}/words; set -- first 'a second'\n{shell}"],
        cwd=tmp_path, check=False, capture_output=True,
    )  # fmt: skip
    assert ran.returncode == 0 and (tmp_path / "words").read_text().splitlines() == found, "as bash itself does"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo hello", "found 0 (none)"),
        ("python prepare.py\npython train.py", "found 2 (python prepare.py; python train.py)"),
        ("python train.py --seed $(cat seed.txt)", r"found $(cat seed.txt)"),
    ],
)
def test_a_shell_script_that_cannot_be_read_is_a_sentence(text, sentence, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        parse_command(["bash", str(path)])
    assert sentence in str(caught.value)


def test_other_forms_of_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert parse_command(["A=1", "B=x=y", sys.executable, "train.py"]).variables == (("A", "1"), ("B", "x=y"))
    assert parse_command(["env", "A=1", sys.executable, "train.py"]).variables == (("A", "1"),)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    with pytest.raises(UserError, match="run uv sync first"):
        parse_command(["uv", "run", "train.py"])
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    for words in (["train.py"], ["--frozen", "python", "train.py"], ["--with", "x", "--", "python3", "train.py"]):
        parsed = parse_command(["uv", "run", *words])
        assert (parsed.interpreter, parsed.program.name) == (str(python), "train.py")
    assert parse_command(["uv", "run", "-m", "my.package", "x"]).program.kind == "module"
    for words, sentence in (
        (["uv", "sync"], "expected uv run"),
        (["deepspeed", "train.py"], "vramcast classify --parallel zero1"),
        (["papermill", "none.ipynb"], "expected a notebook at none.ipynb"),
        (["jupyter", "lab"], "expected a notebook"),
        (["bash"], "found none"),
        (["A=1"], "found none"),
    ):
        with pytest.raises(UserError, match=sentence):
            parse_command(words)


def test_a_notebook_without_cells_is_a_sentence(tmp_path):
    path = tmp_path / "n.ipynb"
    for text in ("", "[]", "{}", json.dumps({"cells": [{"cell_type": "code"}]})):
        path.write_text(text)
        with pytest.raises(UserError, match="expected a notebook of format 4"):
            notebook_source(path)
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["if a:\n", "    !ls\n", "%env A=b c\n"]}]}))
    assert "    pass  # !ls" in notebook_source(path) and "environ['A'] = 'b c'" in notebook_source(path)
