"""`vramcast place`, and the options of `vramcast serve`."""

import json
from pathlib import Path

import pytest
from loopback import loopback
from network_files import exported_program, written
from served import GPUMEMNET, MLP

from vramcast.commands.collocation import place_command as place
from vramcast.commands.collocation import serve_command as serve

SMI = "0, 3000, 40960, NVIDIA A100-SXM4-40GB\n1, 20000, 40960, NVIDIA A100-SXM4-40GB\n2, 15000, 15360, Tesla T4\n"


def test_a_need_is_placed_and_only_the_id_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert place.main(["--need-mib", "5000", "--gpu", "0=4000/40960", "--gpu", "1=9000/40960", "--gpu", "2=6000"]) == 0
    result = capsys.readouterr()
    assert result.out == "2\n"
    assert "1000 stay free" in result.err


def test_the_exit_code_is_1_if_the_job_fits_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert place.main(["--need-mib", "5000", "--margin-mib", "2048", "--gpu", "a=6000/40960"]) == 1
    result = capsys.readouterr()
    assert result.out == ""
    assert "needs 7048 MiB, 6000 are free" in result.err


def test_a_gpu_of_unknown_size_is_never_too_small_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert place.main(["--need-mib", "500", "--gpu", "0=100", "--json"]) == 1
    (refused,) = json.loads(capsys.readouterr().out)["refused"]
    assert refused == {"gpu": "0", "reason": "needs 500 MiB, 100 are free", "for_good": False}


def test_a_network_is_classified_for_each_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = tmp_path / "gpus.csv"
    gpus.write_text(SMI, encoding="utf-8")
    assert place.main([json.dumps(MLP), "--gpus", str(gpus), "--policy", "most-free", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [item["gpu"] for item in result["placements"]] == ["1", "2", "0"]
    needs = {item["gpu"]: item["need_mib"] for item in result["placements"]}
    assert needs["2"] < needs["0"], "the context of a T4 is smaller"
    assert set(result["answers"]) == {"a100_40gb", "t4"}


def test_a_file_without_code_is_classified_from_its_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "two words", exported_program())
    job = f"'{path}' batch_size=64 optimizer=sgd"
    assert place.main([job, "--gpu", "0=30000", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"].values()
    assert (answer["batch_size"], answer["checkpoint"]) == (64, "universal_layers")
    for words, message in (
        (f"'{path}' optimizer=sgd", "expected batch_size=N"),
        (f"'{path}' batch_size=4 color=red", "expected training options among"),
        (f"'{tmp_path}/none.onnx' batch_size=4", "expected a spec as JSON"),
    ):
        assert place.main([words, "--gpu", "0=30000"]) == 2
        assert message in capsys.readouterr().err


def test_a_job_file_of_carma_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rad, job = tmp_path / "job.rad", tmp_path / "job.yaml"
    rad.write_text("\n".join("abcdefg"), encoding="utf-8")
    job.write_text("name: x\n", encoding="utf-8")
    assert place.main([GPUMEMNET, "--rad", str(rad), "--yaml", str(job)]) == 0
    need = int(capsys.readouterr().out)
    assert need > 400
    assert abs(int(rad.read_text(encoding="utf-8").splitlines()[10]) - need) <= 1
    assert job.read_text(encoding="utf-8").startswith("name: x\nestimated_memory_mib: ")


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"need_mib": 1.0, "estimate_mib": 1.0, "verdict": "fits", "basis": "forecast"}).encode()
    secret = tmp_path / "token"
    secret.write_text("from-file\n", encoding="utf-8")
    monkeypatch.setenv("VRAMCAST_TOKEN", "from-environment")
    words = [json.dumps(MLP), "--gpu", "0=800", "--service"]
    with loopback((200, answer)) as service:
        assert place.main([*words, service.url]) == 0
        assert place.main([*words, service.url, "--token-file", str(secret)]) == 0
        assert [headers["Authorization"] for _, _, headers in service.asked] == [
            "Bearer from-environment",
            "Bearer from-file",
        ]


def test_a_service_is_used_with_a_fallback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"need_mib": 700.0, "estimate_mib": 1.0, "verdict": "fits", "basis": "forecast", "device": "a100_40gb"}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(MLP), encoding="utf-8")
    with loopback((200, json.dumps(answer).encode())) as service:
        assert place.main([str(path), "--gpu", "0=800", "--service", service.url]) == 0
        assert json.loads(service.asked[0][1])["spec"] == MLP
        url = service.url
    capsys.readouterr()
    assert place.main([str(path), "--gpu", "0=800", "--service", url, "--fallback-mib", "900"]) == 1
    assert "needs 900 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--need-mib", "1"],
        ["--gpu", "0=1"],
        ["--need-mib", "1", "--gpu", "0:1"],
        ["--need-mib", "nan", "--gpu", "0=1"],
        ["--need-mib", "1", "--margin-mib", "inf", "--gpu", "0=1"],
        ["--need-mib", "1", "--margin-mib=-1", "--gpu", "0=1"],
        [json.dumps(MLP), "--gpu", "0=1", "--service", "nowhere"],
        ["--need-mib", "1", "--gpus", "nowhere.csv"],
        ["nowhere.json", "--gpu", "0=1"],
        ['{"family": 1}', "--gpu", "0=1"],
        ['{"table": 1}', "--gpu", "0=1"],
        ["{", "--gpu", "0=1"],
    ],
)
def test_bad_input_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert place.main(words) == 2
    assert capsys.readouterr().err.startswith("vramcast place: expected")


@pytest.mark.parametrize("text", ["[1]", "[NaN", '[{"id": 0, "free_mib": NaN}]', "0, many, 1"])
def test_gpus_that_cannot_be_parsed_are_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpus"
    path.write_text(text, encoding="utf-8")
    assert place.main(["--need-mib", "1", "--gpus", str(path)]) == 2
    assert "vramcast place: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--workers", "0"],
        ["--port", "99999"],
        ["--port", "-1"],
        ["--risk", "2"],
        ["--tls-cert", "a.pem"],
        ["--tls-cert", "a.pem", "--tls-key", "b.pem"],
        ["--token-file", "nowhere"],
        ["--resource", "abacus"],
        ["--checkpoint", "nowhere"],
        ["--device", "abacus"],
        ["--named-specs", "nowhere.jsonl"],
        ["--history", "/dev/null/history"],
    ],
)
def test_serve_refuses_bad_settings_in_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(words) == 2
    assert capsys.readouterr().err.startswith("vramcast serve: expected")
