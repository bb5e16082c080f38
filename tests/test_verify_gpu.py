"""`vramcast device verify`, with recorded rows instead of a GPU."""

import json
import math
from dataclasses import replace

import pytest
from nvml_stub import without_driver

from vramcast.commands.device.device_command import main
from vramcast.dataset_builder.backends.cuda.backend import CudaBackend
from vramcast.dataset_builder.configuration import make_virtual
from vramcast.dataset_builder.golden import golden_specs
from vramcast.dataset_builder.store import read_journal
from vramcast.dataset_builder.verification import measure_golden, write_recorded
from vramcast.device.profiles import device_or_default, load_device
from vramcast.jobs.filters import Rejected, check
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.training.setup import LOSSES

MIB = 2**20
GPU = "NVIDIA A100-SXM4-40GB"


@pytest.fixture(scope="module")
def simulated():
    """The golden specs on the virtual GPU."""
    return measure_golden(make_virtual(load_device("a100_40gb")), lambda _: None)


@pytest.fixture
def reused(simulated, monkeypatch):
    """Reuse the simulated rows of this profile, which take seconds."""

    def answer(backend, on_row):
        return simulated if backend.device == "a100_40gb" else measure_golden(backend, on_row)

    monkeypatch.setattr("vramcast.commands.device.verify_command.measure_golden", answer)


@pytest.fixture
def record(simulated, tmp_path):
    """Write a file of rows as a GPU would have measured them, each changed by a function of its index."""

    def make(change=lambda place, measurement: measurement, rows=20):
        measured = []
        for place, row in enumerate(simulated[:rows]):
            provenance = replace(row.provenance, origin=CudaBackend.origin, backend=CudaBackend.name, device=GPU)
            measured.append(replace(row, measurement=change(place, row.measurement), provenance=provenance))
        write_recorded(tmp_path / "gpu.jsonl", measured)
        return str(tmp_path / "gpu.jsonl")

    return make


def scaled(factor, overhead_mib=0):
    def change(place, measurement):
        reserved_bytes = int(measurement.reserved_bytes * factor)
        used_bytes = reserved_bytes + measurement.device_used_bytes - measurement.reserved_bytes + overhead_mib * MIB
        return replace(measurement, reserved_bytes=reserved_bytes, device_used_bytes=used_bytes)

    return change


def verify(capsys, *words):
    code = main(["verify", *words])
    return code, capsys.readouterr()


class TestGolden:
    def test_twenty_specs_that_differ_and_can_run(self):
        specs = golden_specs()
        assert len(specs) == len({spec.id for spec in specs.values()}) == 20
        rejected = {label: found.reason for label, spec in specs.items() if isinstance(found := check(spec), Rejected)}
        assert not rejected

    def test_they_cover_the_settings_that_affect_memory(self):
        specs = golden_specs().values()
        training = [spec.training for spec in specs]
        assert {spec.family for spec in specs} == {"mlp", "cnn", "transformer", "template"}
        assert len({item.optimizer for item in training}) >= 7
        assert {item.implementation for item in training} >= {"default", "fused", "single"}
        assert {item.autocast for item in training} == {None, "bf16", "fp16"}
        assert any(item.accumulate > 1 for item in training)
        assert any(item.checkpointing for item in training)
        assert any(item.dry_run_batch_size for item in training)
        assert sum(item.last_batch_size is not None for item in training) >= 4
        assert all(item.loss in LOSSES for item in training)

    def test_they_fit_a_small_gpu(self):
        found = [row.measurement for row in measure_golden(make_virtual(load_device("rtx_4060")), lambda _: None)]
        assert {item.status for item in found} == {Status.OK}
        peaks = sorted(item.device_used_bytes for item in found)
        assert peaks[-1] < 6 * 1024 * MIB  # of 8,188: room for a context larger than the profile's
        assert peaks[-1] > 10 * peaks[0]


@pytest.mark.usefixtures("reused")
class TestRecorded:
    def test_a_gpu_that_agrees_passes(self, record, capsys):
        code, printed = verify(capsys, "--recorded", record(scaled(1.02, overhead_mib=30)))
        lines = printed.out.splitlines()
        assert code == 0
        assert lines[0] == f"{GPU} against the profile a100_40gb"
        assert [line.split("  ")[0].strip() for line in lines[2:22]] == list(golden_specs())
        assert all("0.980" in line and line.endswith("near") for line in lines[2:22])
        assert lines[22] == "20 of 20 ran on both; reserved: median error 2.0%, worst 2.0%, 0 too low by over 2%"
        assert lines[-1] == "PASS (all run, median error up to 5%, worst up to 25%)"

    def test_the_measured_context_is_reported(self, record, capsys):
        _, printed = verify(capsys, "--recorded", record(scaled(1.0, overhead_mib=100)), "--json")
        figures = json.loads(printed.out)
        assert figures["measured_context_mib"] == figures["virtual_context_mib"] + 100

    @pytest.mark.parametrize(
        ("factor", "error", "passed"), [(1.0, 0.0, True), (1.5, 1 / 3, False), (0.93, 0.0753, False)]
    )
    def test_the_verdict_follows_the_thresholds(self, record, capsys, factor, error, passed):
        code, printed = verify(capsys, "--recorded", record(scaled(factor)), "--json")
        figures = json.loads(printed.out)
        assert code == (0 if passed else 1)
        assert figures["passed"] is passed
        assert math.isclose(figures["median_error"], error, abs_tol=1e-3)
        assert figures["too_low"] == (20 if factor == 1.5 else 0)
        assert len(figures["specs"]) == 20

    def test_one_large_error_fails(self, record, capsys):
        def change(place, measurement):
            return scaled(1.4 if place == 7 else 1.0)(place, measurement)

        code, printed = verify(capsys, "--recorded", record(change))
        assert code == 1
        assert printed.out.splitlines()[2 + 7].endswith("far")
        assert "worst 28.6%, 1 too low" in printed.out

    def test_one_spec_that_did_not_run_fails_with_its_reason(self, record, capsys):
        def change(place, measurement):
            crash = replace(
                measurement, status=Status.CRASHED, reserved_bytes=None, device_used_bytes=None, evidence="Xid 13"
            )
            return crash if place == 3 else measurement

        code, printed = verify(capsys, "--recorded", record(change))
        assert code == 1
        assert printed.out.splitlines()[2 + 3].endswith("crashed: Xid 13")
        assert "19 of 20 ran on both" in printed.out

    def test_caps_that_held_are_counted(self, record, capsys):
        def change(place, measurement):
            return replace(measurement, cap_bytes=measurement.reserved_bytes, cap_held=place != 4)

        _, printed = verify(capsys, "--recorded", record(change))
        assert "as the allocator's limit 19 of 20 estimates were enough" in printed.out

    def test_another_profile_can_be_named(self, record, capsys):
        _, printed = verify(capsys, "--recorded", record(), "--device", "t4")
        assert printed.out.startswith(f"{GPU} against the profile t4")

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["--recorded", "{short}"], "found none of ['mobilenet']"),
            (["--recorded", "nowhere"], "expected a build directory"),
            (["--recorded", "{short}", "--cap"], "expected --recorded alone"),
            (["--recorded", "{short}", "--record", "x"], "expected --recorded alone"),
        ],
    )
    def test_bad_arguments_are_one_error(self, record, capsys, words, sentence):
        file = record(rows=19)
        code, printed = verify(capsys, *(word.replace("{short}", file) for word in words))
        assert code == 2
        assert sentence in printed.err

    def test_simulated_rows_are_refused(self, simulated, tmp_path, capsys):
        write_recorded(tmp_path / "rows.jsonl", simulated)
        code, printed = verify(capsys, "--recorded", str(tmp_path / "rows.jsonl"))
        assert code == 2
        assert "expected measured rows of all golden specs" in printed.err


PLAYED = """
import sys
import vramcast.dataset_builder.configuration as configuration
import vramcast.dataset_builder.verification as verification
from stubbed_cuda import fake
few = dict(list(verification.golden_specs().items())[:3])
verification.golden_specs = lambda: few
configuration.make_cuda = lambda settings, estimator=None: fake("capped", estimator, **settings)
from vramcast.commands.device.device_command import main
sys.exit(main(["verify", *sys.argv[1:]]))
"""


def test_measured_rows_can_be_recorded_and_compared_again(driver, capsys, monkeypatch):
    """On a machine with a stub as its driver, a fake child reports 500 MiB for every spec."""
    driver.stub.gpu().write()
    few = dict(list(golden_specs().items())[:3])
    monkeypatch.setattr("vramcast.dataset_builder.verification.golden_specs", lambda: few)
    file = driver.folder / "gpu.jsonl"
    result = driver.run(PLAYED, "--record", str(file), "--cap")
    assert result.returncode == 1, result.stderr
    assert "FAIL" in result.stdout
    assert result.stderr.count(": ok after") == len(few) == 3
    rows = read_journal(file).rows
    assert [row.spec for row in rows] == list(few.values())
    assert {row.provenance.device for row in rows} == {GPU}
    assert {row.measurement.cap_held for row in rows} == {True, False}
    code, printed = verify(capsys, "--recorded", str(file))
    assert (code, printed.out) == (1, result.stdout)


def test_a_missing_driver_is_one_error(driver):
    code = "import sys; from vramcast.commands.device.device_command import main; sys.exit(main(['verify']))"
    result = driver.run(code, LD_LIBRARY_PATH=str(without_driver(driver.folder)))
    assert result.returncode == 2
    assert "backend=virtual" in result.stderr


@pytest.mark.parametrize(
    ("gpu", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_80gb"),
        ("Tesla V100-SXM2-16GB", "v100_16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA H100 80GB HBM3", "h100_80gb"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx_2080ti"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_a_profile_is_found_by_the_name_of_the_gpu(gpu, profile):
    notes = []
    assert device_or_default(gpu, notes.append) == profile
    assert not notes


@pytest.mark.parametrize(
    "gpu", ["Quadro P4000", "NVIDIA GeForce RTX 3060 Ti", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", None]
)
def test_a_gpu_without_a_profile_is_noted(gpu):
    notes = []
    assert device_or_default(gpu, notes.append) == "a100_40gb"
    assert "--device" in notes[0]
