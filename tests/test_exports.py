"""Jobs that are simulated where their code is, and sent to where it is not."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from served import MLP, Service, serving

from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.collocation.local_answers import answers_on
from vramcast.collocation.service.loaded_checkpoint import Checkpoint
from vramcast.commands.classify.classify_command import main
from vramcast.commands.collocation.job_argument import read_job
from vramcast.commands.run.run_command import main as run_main
from vramcast.errors import UserError
from vramcast.jobs.code_files import changed_files, code_hashes

NETWORK = """
from torch import nn
from parts import block
from package.inner import width

def make():
    return nn.Sequential(*(block(width) for _ in range(3)))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "parts.py").write_text("from torch import nn\ndef block(n):\n    return nn.Linear(n, n)\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from . import inner\n")
    (tmp_path / "package" / "inner.py").write_text("width = 64\n")
    (tmp_path / "other.py").write_text("raise SystemExit\n")
    return tmp_path


def test_the_service_answers_an_export_like_classify_and_a_change_of_the_code_is_seen(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["net.py:make", "--input", "64", "--batch-size", "16", "--optimizer", "sgd", "--device", "t4", "--json"]
    assert main([*words, "--export", "job.json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    text = (project / "job.json").read_text()
    export = json.loads(text)
    assert set(export["code"]) == {"net.py", "parts.py", "package/__init__.py", "package/inner.py"}
    assert len(export["peaks"]) > 10
    assert job_of_text(text) == {"export": export}
    assert answers_on({"export": export}, ["t4"], "universal", 0.01)["t4"].to_dict()["safe_mib"] == expected["safe_mib"]

    async def scenario(service: Service) -> None:
        answer = (await service.post("/v1/classify", {"export": export, "device": "t4"})).json
        for name in ("estimate_mib", "safe_mib", "reserved_mib", "breakdown_mib", "target", "verdict"):
            assert answer[name] == expected[name]
        assert any("exported by vramcast" in note for note in answer["notes"])
        assert b"shards=" in (await service.post("/v1/slurm", text.encode())).body
        job = {"export": {**export, "notes": [], "code": {}}, "device": "t4"}
        stored = await service.post("/v1/observations", {"job": job, "peak_mib": 900})
        assert stored.json["runs"] == 1
        again = (await service.post("/v1/classify", {"export": export, "device": "t4"})).json
        assert again["observed"] == {"runs": 1, "peak_mib": 900.0}, "notes and hashes make no other job"
        for change, part in (
            ({"peaks": {}}, "peaks"),
            ({"vramcast_job": 2}, "vramcast_job"),
            ({"table": {**export["table"], "layers": []}}, "layers"),
            ({"training": {**export["training"], "optimizer": "Own"}}, "an optimizer of"),
            ({"peaks": {"nonsense": export["peaks"]["t4"]}}, "an export with the device t4"),
        ):
            wrong = await service.post("/v1/classify", {"export": {**export, **change}, "device": "t4"})
            assert wrong.status == 422
            assert part in wrong.json["error"]

    async def all_of_it() -> None:
        async with serving(load=Checkpoint) as service:
            await scenario(service)

    asyncio.run(all_of_it())
    assert read_job("job.json") == {"export": export}
    assert capsys.readouterr().err == ""
    (project / "package" / "inner.py").write_text("width = 128\n")
    read_job("job.json")
    assert "package/inner.py changed since job.json was exported" in capsys.readouterr().err


def test_a_script_is_exported_by_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "train.py").write_text(
        "import torch\nfrom net import make\nnet = make().cuda()\noptimizer = torch.optim.SGD(net.parameters())\n"
        "for _ in range(3):\n    net(torch.randn(8, 64, device='cuda')).sum().backward()\n    optimizer.step()\n"
    )
    assert run_main(["--json", "--device", "t4", "--export", "job.json", "--", sys.executable, "train.py"]) == 0
    expected = json.loads(capsys.readouterr().out)
    export = json.loads((project / "job.json").read_text())
    assert "train.py" in export["code"]
    assert "parts.py" in export["code"]
    answer = answers_on({"export": export}, ["t4"], "universal", 0.01)["t4"]
    assert answer.to_dict()["estimate_mib"] == expected["estimate_mib"]


def test_only_files_of_the_users_own_are_hashed(project: Path) -> None:
    hashes = code_hashes(project / "net.py", project)
    assert not any("torch" in name for name in hashes)
    assert changed_files(hashes, project) == []
    (project / "parts.py").unlink()
    assert changed_files(hashes, project) == ["parts.py"]
    (project / "broken.py").write_text("def (:\n")
    assert set(code_hashes(project / "broken.py", project)) == {"broken.py"}


def test_an_export_needs_a_network_and_a_place(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["net.py:make", "--input", "64", "--batch-size", "2"]
    assert main([*words, "--export", "nowhere/job.json"]) == 2
    assert "expected a file in a directory" in capsys.readouterr().err
    assert run_main(["--export", ".", "--", "python", "other.py"]) == 2
    (project / "jobs.jsonl").write_text("{}\n")
    assert main(["--jobs", "jobs.jsonl", "--json", "--export", "job.json"]) == 2


@pytest.mark.parametrize(
    "change", [{"table": 3}, {"training": {}}, {"peaks": {"t4": {}}}, {"target": None, "peaks": []}]
)
def test_a_damaged_export_is_bad_input(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="expected"):
        answers_on({"export": {"vramcast_job": 1, **MLP, **change}}, ["t4"], "universal", 0.01)
