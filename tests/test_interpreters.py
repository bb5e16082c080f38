"""`--python`: networks that are built and traced by an interpreter of the user's, which has torch and not vramcast."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vramcast import start
from vramcast.commands.classify.classify_command import main
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.sandbox.client import ChildSimulator, interpreter
from vramcast.simulation.sandbox.failures import NetworkError

TORCH_NEEDS = (
    "torch", "torchgen", "functorch", "typing_extensions", "sympy", "mpmath", "filelock", "jinja2", "markupsafe",
    "networkx", "fsspec",
)  # fmt: skip
NETWORK = """
import sys
from torch import nn

def make():
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))

def modules():
    raise ValueError(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that finds torch, what torch itself needs, and nothing else."""
    root = tmp_path_factory.mktemp("bare") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    home = next(root.glob("lib/python*/site-packages"))
    for name in TORCH_NEEDS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            place = origin.parent if origin.name == "__init__.py" else origin
            (home / place.name).symlink_to(place)
            for record in place.parent.glob(f"{name}-*.dist-info"):
                (home / record.name).symlink_to(record)
    return root / "bin" / "python"


@pytest.fixture
def request_for(tmp_path):
    (tmp_path / "net.py").write_text(NETWORK)

    def make(name="make", **options):
        target = parse_target(f"{tmp_path / 'net.py'}:{name}")
        return BuildRequest(target=target, inputs=("12",), directory=str(tmp_path), **options)

    return make


def test_a_network_is_traced_by_an_interpreter_that_has_torch_alone(python, request_for):
    profile = load_profile("a100_40gb")
    with ChildSimulator(request_for(python=str(python))) as child:
        there = child.simulate({"batch_size": 4}, [profile])
        assert child.curve({"batch_size": 4}, profile).reserved_bytes
    with ChildSimulator(request_for()) as child:
        here = child.simulate({"batch_size": 4}, [profile])
    assert there == here
    assert there.traced_with["torch"]


def test_the_child_imports_torch_and_the_standard_library_alone(python, request_for):
    with ChildSimulator(request_for("modules", python=str(python))) as child, pytest.raises(NetworkError) as caught:
        child.simulate({"batch_size": 4}, [])
    names = set(str(caught.value).partition("ValueError: ")[2].partition(" (at")[0].split())
    assert "vramcast" in names
    foreign = {name for name in names - sys.stdlib_module_names if not name.startswith("_")}
    assert foreign <= {*TORCH_NEEDS, "vramcast", "net"}


def test_libraries_of_this_interpreter_do_not_reach_the_users(python):
    lines = "import importlib.util as u; print([n for n in ('numpy', 'yaml', 'vramcast') if u.find_spec(n)])"
    assert (
        subprocess.run([python, "-P", "-c", lines], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_an_interpreter_is_named_by_path_command_or_directory(python, tmp_path, monkeypatch):
    assert interpreter(str(python)) == interpreter(str(python.parent.parent)) == str(python)
    monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    assert interpreter("python") == str(python)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "expected a Python interpreter at .*absent, found none: name one such as .venv/bin/python"),
        ("no program", "expected a Python interpreter at .*program, found: Exec format error"),
        ("#!/bin/sh\necho what; exit 5", "found another program: the child ended with exit code 5: what"),
        (f'#!/bin/sh\nexec {sys.executable} -S "$@"', "expected torch in .*, found none: name the interpreter of your"),
    ],
)
def test_an_interpreter_that_does_not_serve_is_reported_in_a_sentence(text, sentence, request_for, tmp_path):
    path = tmp_path / ("absent" if text is None else "program")
    if text is not None:
        path.write_text(text)
        path.chmod(0o755)
    with pytest.raises(UserError, match=sentence), ChildSimulator(request_for(python=str(path))) as child:
        child.simulate({"batch_size": 4}, [])


def test_an_old_python_reports_its_version(tmp_path):
    """`start.py` itself refuses; the version is that of this interpreter with the bound raised."""
    copy = tmp_path / "start.py"
    copy.write_text(Path(start.__file__).read_text().replace("OLDEST = (3, 11)", "OLDEST = (4, 0)"))
    result = subprocess.run([sys.executable, copy, "module", "1"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    found = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    assert f"expected Python 4.0 or newer in {sys.executable}, found {found}" in json.loads(result.stdout)["reason"]


def test_an_old_torch_is_reported(tmp_path, request_for):
    (tmp_path / "torch-1.13.1.dist-info").mkdir()
    (tmp_path / "torch-1.13.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n"
    )
    with (
        pytest.raises(UserError, match=r"expected torch 2.4 or newer in .*, found 1.13.1: update it"),
        ChildSimulator(request_for(), environment={"PYTHONPATH": str(tmp_path)}) as child,
    ):
        child.simulate({"batch_size": 4}, [])


def test_the_command_takes_an_interpreter_for_all_jobs_or_for_one(python, request_for, tmp_path, capfd):
    request_for()
    job = {"target": f"{tmp_path / 'net.py'}:make", "batch_size": 4, "input": "12"}
    spec = {"target": "gpumemnet:input:784_output:10_depth:3_arch:pyramid_batch:64.out", "python": str(python)}
    lines = [job, {**job, "python": str(python)}, {**job, "python": "nowhere"}, {**job, "python": 3}, spec]
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["--jobs", str(tmp_path / "jobs.jsonl"), "--json"]) == 2  # some lines fail
    first, second, *bad = map(json.loads, capfd.readouterr().out.splitlines())
    assert first["reserved_mib"] == second["reserved_mib"]
    assert first["traced_with"] == second["traced_with"]
    assert [item["status"] for item in bad] == ["error"] * 3
    for item, words in zip(bad, ("found none", "to be a text", "leave it out"), strict=True):
        assert words in item["error"]
