"""Calibrating a device profile: known constants are recovered, and constants without rows stay unchanged."""

import re
from dataclasses import replace

import pytest
import yaml

from vramcast.commands.device import calibrate_command as calibrating
from vramcast.commands.device.device_command import main
from vramcast.commands.device.probe_calibration import constant_specs
from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.dataset_builder.rows import Provenance, Row
from vramcast.device.calibration.rows import Calibration, Sample, calibrate
from vramcast.device.profiles import load_device
from vramcast.errors import UserError
from vramcast.jobs.families import make_spec
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import parse_profile
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.training.setup import TrainingSetup

RULES = [{"pointwise": True, "copies": 1.0}, {"direction": "forward", "copies": 1.0}, {"copies": 2.0}]
TRUTH = parse_profile(
    {
        "name": "truth", "title": "A GPU", "total_mib": 16000, "compute_capability": 8.0, "context_mib": 321,
        "cudnn_mib": 77, "convolution": RULES, "calibrated_on": "itself",
    }
)  # fmt: skip


def cnn(batch, filters=64, size=64):
    network = {
        "arch": "uniform", "input_channels": 3, "input_size": size, "num_classes": 10, "depth": 3,
        "base_filters": filters, "norm": "batch",
    }  # fmt: skip
    return make_spec("cnn", network, TrainingSetup(batch_size=batch))


def mlp(batch):
    network = {"arch": "uniform", "input_features": 512, "output_features": 10, "depth": 3}
    return make_spec("mlp", network, TrainingSetup(batch_size=batch))


@pytest.fixture(scope="module")
def samples():
    specs = [cnn(8), cnn(16, 96), cnn(32, 48), cnn(24, 128), cnn(12, 80, 96), mlp(64), mlp(512)]
    traces = [trace_spec(spec) for spec in specs]
    return [Sample(trace, simulate(trace, TRUTH, AllocatorOptions()).device_used_bytes) for trace in traces]


def test_known_constants_and_rules_are_recovered_from_scratch(samples):
    start = calibrating.from_scratch(replace(TRUTH, padded_depthwise_channels=96, padded_strided_channels=64))
    assert start.context_mib == 0
    assert start.padded_depthwise_channels is start.padded_strided_channels is None
    assert len(start.convolution) == 1
    result = calibrate(start, samples)
    assert result.profile.context_mib == 321
    assert result.profile.cudnn_mib == pytest.approx(77, abs=5)
    assert result.median_error_before > 0.2
    assert result.median_error_after < 0.003
    assert any(change.startswith("context_mib 0 -> 321") for change in result.changed)
    assert any("copies 2" in change for change in result.changed)


def test_a_right_profile_stays_unchanged(samples):
    result = calibrate(TRUTH, samples)
    assert result.profile == TRUTH
    assert result.changed == ()


def test_known_reserved_memory_gives_the_constants_alone():
    specs = constant_specs()
    truth = replace(TRUTH, batch_norm_mib=33)
    measured = [(trace_spec(spec), simulate(trace_spec(spec), truth, AllocatorOptions())) for spec in specs]
    known = [Sample(trace, item.device_used_bytes, item.reserved_bytes) for trace, item in measured]
    result = calibrate(calibrating.from_scratch(TRUTH), known, rules=False)
    assert (result.profile.context_mib, result.profile.cudnn_mib, result.profile.batch_norm_mib) == (321, 77, 33)


def test_one_disturbed_row_does_not_decide(samples):
    disturbed = [*samples[:-1], replace(samples[-1], used_bytes=samples[-1].used_bytes + 8000 * MIB)]
    result = calibrate(TRUTH, disturbed)
    assert result.profile.convolution == TRUTH.convolution


def test_no_rows_to_calibrate_on_is_an_error():
    with pytest.raises(UserError, match="expected completed rows to calibrate on, found none"):
        calibrate(TRUTH, [])


def row(spec, used_mib=2000, status=Status.OK, origin="measured"):
    provenance = Provenance(origin=origin, backend="cuda", device="gpu", versions={}, seed=0, time="2026")
    return Row(spec, None, Measurement(status=status, device_used_bytes=used_mib * MIB), provenance)


def test_rows_of_one_network_are_chosen_together():
    rows = [row(cnn(batch, filters)) for filters in (16, 32, 64, 128) for batch in (2, 4, 8)]
    chosen, rest = calibrating.choose([*rows, row(mlp(8), status=Status.OOM)], 5, seed=1)
    assert len(chosen) == 6
    assert len(chosen) + len(rest) == 12
    assert not {item.spec.group for item in chosen} & {item.spec.group for item in rest}
    assert calibrating.choose(rows, 5, seed=1)[0] == chosen
    assert calibrating.choose(rows, 5, seed=2)[0] != chosen
    assert calibrating.choose(rows, 99, seed=1)[1] == []
    assert calibrating.choose([], 5, seed=1) == ([], [])


def test_a_written_profile_reads_back_with_its_evidence(tmp_path):
    path = tmp_path / "mine.yaml"
    calibrating.write_profile(path, Calibration(TRUTH, 30, 0.2, 0.01, ("context_mib 0 -> 321",)), "mine", "my rows")
    assert path.read_text().startswith("# A GPU, calibrated by")
    read = parse_profile(yaml.safe_load(path.read_text()))
    assert read.name == "mine"
    assert "30 rows of my rows" in read.calibrated_on
    assert "20.00% before, 1.00% after" in read.calibrated_on
    assert replace(read, name="truth", calibrated_on="itself") == TRUTH


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["my-gpu"], "expected letters, digits and underscores in a device's name, found 'my-gpu'"),
        (["a100_40gb"], "expected a new name, found the shipped profile a100_40gb"),
        (["mine", "-o", "."], r"expected no profile at \., found one"),
        (["mine", "--from-rows", "nowhere.csv"], "expected a CSV table at nowhere.csv"),
        (
            ["mine", "--from-rows", "a.csv", "--from-device", "t4"],
            "expected one of --from-rows, --from-device, --from-cudnn and --from-snapshot, found more",
        ),
        (["mine", "--start", "keras"], "device"),
    ],
)
def test_bad_arguments_are_one_error(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words]) == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_a_missing_driver_is_one_error(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "mine", "-o", "mine.yaml"]) == 2
    assert "backend=virtual" in capsys.readouterr().err


@pytest.mark.slow
def test_public_rows_make_a_profile_that_explains_others(public_table, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vramcast.device.calibration.rows._MOST_STEPS", 1)
    monkeypatch.setattr("vramcast.device.calibration.rows._MOVES", 12)
    table = str(public_table("gpumemnet/cnn_data_step1.csv"))
    out = tmp_path / "mine.yaml"
    words = ["--from-rows", table, "--start", "a100_40gb_gpumemnet_2024", "--from-scratch", "--rows", "8"]
    assert main(["calibrate", "mine", *words, "--test", "6", "-o", str(out)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("on ")]
    before, fitted, _ = (float(re.search(r"median error ([0-9.]+)%", line)[1]) for line in lines)
    assert before > 20
    assert fitted < before / 4, "of rows that it was not fitted to"
    assert parse_profile(yaml.safe_load(out.read_text())).total_mib == load_device("a100_40gb")["total_mib"]
