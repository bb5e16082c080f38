"""The package as users install it: a wheel in an environment of its own, used in projects whose names are like ours."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from measured_tables import small_table

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "checkpoints", "collocation", "conf", "dataset_builder", "device", "jobs", "models", "simulation", "train",
    "virtual_gpu", "vramcast",
)  # fmt: skip
GPUMEMNET = "gpumemnet:input:784_output:10_depth:3_arch:pyramid_batch:64.out"
JOBS = "job,num_gpus,batch_size,actual_peak_mib,solo_seconds\nsmall,1,32,1500,100\n"
TRACE = "arrival_s,job\n0,small\n5,small\n"
LIBRARIES = [item for item in sys.path if Path(item).name in ("site-packages", "dist-packages")]
NETWORK = """
import torch
from torch import nn
from models.unet import WIDTH
from conf.sizes import CLASSES

def make():
    return nn.Linear(WIDTH, CLASSES)

if __name__ == "__main__":
    network = make().cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(3):
        network(torch.randn(8, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A copy of the checkout, its sdist, the wheel of the copy and the wheel of the sdist."""
    root = tmp_path_factory.mktemp("built")
    copy = root / "checkout"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
    copy.mkdir()
    for name in (*PACKAGES, "tests", "benchmarks"):
        shutil.copytree(CHECKOUT / name, copy / name, symlinks=True, ignore=skipped)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, copy)
    hooks = f"from setuptools import build_meta as b; b.build_sdist({str(root)!r}); b.build_wheel({str(root)!r})"
    run([sys.executable, "-c", hooks], copy)
    sdist, wheel = next(root.glob("*.tar.gz")), next(root.glob("*.whl"))
    with tarfile.open(sdist) as archive:
        archive.extractall(root / "unpacked", filter="data")
    unpacked = next((root / "unpacked").iterdir())
    (root / "again").mkdir()
    run(
        [sys.executable, "-c", f"from setuptools import build_meta as b; b.build_wheel({str(root / 'again')!r})"],
        unpacked,
    )
    return copy, sdist, wheel, next((root / "again").glob("*.whl"))


def run(words, directory, **environment):
    """Run a command to its end; the checkout is on no path of it."""
    names = {"PYTHONPATH", "PYTHONHOME", "VRAMCAST_CONFIG"}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    result = subprocess.run(
        list(map(str, words)), cwd=directory, env={**kept, **environment}, text=True, capture_output=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, f"{words}: {result.stdout[-2000:]}{result.stderr[-4000:]}"
    return result.stdout


def environment_with(root, *words):
    """Make an environment with vramcast installed, and this interpreter's libraries but for vramcast itself."""
    run([sys.executable, "-m", "venv", "--without-pip", root], root.parent)
    home = next(root.glob("lib/python*/site-packages"))
    (home / "dependencies.pth").write_text("\n".join(LIBRARIES) + "\n")  # .pth files inside of these are not read
    pip = [sys.executable, "-m", "pip", "--python", root / "bin" / "python", "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", *words], root.parent)
    return home


def project(directory, packaged):
    """Write a user's project, whose packages have the names of ours."""
    for name in ("models", "conf"):
        (directory / name).mkdir(parents=True)
        if packaged:
            (directory / name / "__init__.py").write_text("")
    (directory / "models" / "unet.py").write_text("WIDTH = 12\n")
    (directory / "conf" / "sizes.py").write_text("CLASSES = 3\n")
    (directory / "train.py").write_text(NETWORK)
    (directory / "jobs.csv").write_text(JOBS)
    (directory / "trace.csv").write_text(TRACE)
    return directory


def tree(directory):
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_a_wheel_holds_one_name_and_every_file_of_the_packages(built):
    copy, sdist, wheel, again = built
    files = {str(path.relative_to(copy)) for name in PACKAGES for path in (copy / name).rglob("*") if path.is_file()}
    expected = {name if name.startswith("vramcast/") else f"vramcast/{name}" for name in files}
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        names = set(first.namelist())
        assert {name for name in names if ".dist-info/" not in name} == expected
        assert {name.split("/")[0].partition("-")[0] for name in names} == {"vramcast"}
        assert {item.filename: item.CRC for item in first.infolist()} == {
            item.filename: item.CRC for item in second.infolist()
        }
    with tarfile.open(sdist) as archive:
        inside = {name.split("/")[1] for name in archive.getnames() if "/" in name}
        assert not inside & {"tests", "benchmarks", "models", "train", "conf"}


def test_every_command_works_from_a_wheel_in_a_project_with_names_like_ours(built, tmp_path):
    home = environment_with(tmp_path / "installed", built[2])
    command, python = (tmp_path / "installed" / "bin" / name for name in ("vramcast", "python"))
    plain, packaged = project(tmp_path / "plain", False), project(tmp_path / "packaged", True)
    table = small_table(tmp_path)
    before = tree(home)
    home.chmod(0o555)  # root may write in spite of it, which the comparison at the end sees

    def vramcast(*words, at=plain):
        return run([command, *words], at, VRAMCAST_CONFIG=str(tmp_path / "config"))

    def classify(target, at):
        return json.loads(vramcast("classify", target, "--batch-size", "8", "--input", "12", "--json", at=at))

    def served():
        with serving(command, plain) as address:
            page = urllib.request.urlopen(address, timeout=10).read().decode()
            observed = vramcast("observe", GPUMEMNET, "--peak-mib", "1234", "--service", address)
            return page + observed + vramcast("place", GPUMEMNET, "--gpu", "7=20000", "--service", address)

    theirs = (
        "import models.unet, conf.sizes, train, vramcast.train as t; print(models.unet.WIDTH, train.make(), t.__file__)"
    )
    with ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(served),
            pool.submit(classify, "train.py:make", plain),
            pool.submit(classify, "train:make", packaged),
            pool.submit(run, [python, "-c", theirs], plain),
            pool.submit(run, [python, "-c", theirs], packaged),
            pool.submit(vramcast, "build", "family=mlp", "n=2", "out=rows", "executor=serial"),
            pool.submit(vramcast, "evaluate", "--data", table, "--backend", "static", at=packaged),
            pool.submit(vramcast, "simulate", "--jobs", "jobs.csv", "--trace", "trace.csv", "--estimator", "oracle"),
            pool.submit(vramcast, "train", "--cfg"),
            pool.submit(vramcast, "run", "--json", "--", python, "train.py"),
            pool.submit(vramcast, "device", "list"),
        ]
        page, *answers = [item.result() for item in work]
    assert "<html" in page
    assert page.rstrip().endswith("7")
    assert [item["status"] for item in answers[:2]] == ["ok", "ok"]
    assert answers[0]["estimate_mib"] == answers[1]["estimate_mib"]
    assert all("in_features=12" in item and str(home) in item for item in answers[2:4])
    assert (plain / "rows" / "journal.jsonl").exists()
    assert json.loads(answers[-2])["status"] == "ok"
    assert "rtx_4090" in answers[-1]
    assert tree(home) == before


@contextmanager
def serving(command, directory):
    """Run `vramcast serve` and yield its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([command, "serve", "--port", str(port), "--quiet"], cwd=directory) as service:
        try:
            for _ in range(600):
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            service.terminate()


def test_an_editable_install_shows_one_name_alone(built, tmp_path):
    environment_with(tmp_path / "installed", "--editable", built[0])
    words = (
        "import models.unet, train, vramcast.models.answer, importlib.util\n"
        "print(vramcast.models.answer.__file__, importlib.util.find_spec('virtual_gpu'))"
    )
    out = run([tmp_path / "installed" / "bin" / "python", "-c", words], project(tmp_path / "plain", False))
    assert out.split() == [str(built[0] / "vramcast" / "models" / "answer.py"), "None"]


def test_training_starts_from_a_checkout_that_is_not_installed(built):
    words = (
        f"import sys, runpy\nsys.path += {LIBRARIES}\nsys.argv = ['train', '--cfg']\n"
        "runpy.run_module('train', run_name='__main__')"
    )
    assert "estimator:" in run([sys.executable, "-S", "-c", words], built[0])
