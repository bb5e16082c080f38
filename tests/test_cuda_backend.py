"""The parent's side of a measurement: monitoring, limits and clean-up, with a fake child and a stub of NVML."""

import json
import re
import time
from dataclasses import dataclass

import pytest
from fake_child import CONTEXT, MIB, PEAK
from nvml_stub import GIB, NOT_SUPPORTED, without_driver
from scripted_backend import alive, wait_until
from stubbed_cuda import Estimates, Stubbed, fake

from vramcast.dataset_builder.backends import BackendResult
from vramcast.dataset_builder.backends.cuda.backend import CudaSettings
from vramcast.dataset_builder.pipeline import make_row
from vramcast.dataset_builder.rows import Row
from vramcast.device.nvml import GpuLostError, NoDriverError
from vramcast.errors import UserError
from vramcast.jobs.families import make_spec
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

MLP = {"arch": "uniform", "input_features": 64, "output_features": 10, "depth": 2}
SPEC = make_spec("mlp", MLP, TrainingSetup(batch_size=8, last_batch_size=3))


@pytest.fixture
def machine(driver):
    """A machine with one free GPU, on which a fake child runs in a mode."""
    driver.stub.gpu().write()

    def measure(mode, estimator=None, **settings):
        return Stubbed(fake(mode, estimator, **settings), driver).measure(SPEC)

    return measure


class TestFigures:
    def test_peaks_come_from_nvml_and_from_torch(self, machine):
        outcome = machine("ok")
        measurement = outcome.measurement
        assert measurement.status is Status.OK
        assert measurement.evidence is None
        assert (measurement.requested_bytes, measurement.allocated_bytes, measurement.reserved_bytes) == (
            1,
            2,
            500 * MIB,
        )
        assert measurement.device_used_bytes == measurement.process_bytes == PEAK
        assert measurement.breakdown == {"context": CONTEXT, "libraries": 100 * MIB, "allocator": 500 * MIB}
        assert (measurement.alone, measurement.others_bytes) == (True, 0)
        assert (outcome.device, outcome.gpu_uuid) == ("NVIDIA A100-SXM4-40GB", "GPU-a")
        assert outcome.versions == {"driver": "555.42.06", "driver_cuda": "12.5", "cuda": "12.4"}

    def test_the_gpu_is_polled_often_enough(self, machine):
        measurement = machine("ok", interval_ms=10).measurement
        assert measurement.samples >= 6  # in the 60 ms of the peak alone, before the context, and after
        assert 10 <= measurement.longest_gap_ms < 500  # of a busy test machine; hosts of GPUs have spare cores

    def test_without_a_process_list_the_growth_of_the_device_counts(self, driver):
        driver.stub.gpu(used=90 * MIB).add(f"processes GPU-a {NOT_SUPPORTED}").write()
        measurement = Stubbed(fake("ok"), driver).measure(SPEC).measurement
        assert measurement.process_bytes is None
        assert measurement.device_used_bytes == PEAK
        assert measurement.others_bytes is None

    def test_in_a_container_the_new_process_is_the_child(self, machine):
        measurement = machine("host_pid").measurement
        assert measurement.process_bytes == PEAK
        assert measurement.others_bytes == 0

    def test_a_run_on_a_full_gpu_is_censored(self, machine):
        measurement = machine("full").measurement
        assert measurement.status is Status.CENSORED
        assert "emptied its cache 3 times" in measurement.evidence

    def test_a_measurement_on_another_gpu_is_refused(self, machine):
        with pytest.raises(UserError, match="expected CUDA to show GPU-a, found GPU-ffff"):
            machine("another_gpu")


class TestFailures:
    def test_out_of_memory_is_an_outcome(self, machine):
        measurement = machine("oom").measurement
        assert measurement.status is Status.OOM
        assert "CUDA out of memory. Tried to allocate 2.00 GiB" in measurement.evidence
        assert measurement.reserved_bytes == 7
        assert measurement.device_used_bytes == PEAK

    def test_out_of_memory_that_aborts_the_process_is_an_outcome(self, machine):
        measurement = machine("oom_abort").measurement
        assert measurement.status is Status.OOM
        assert measurement.evidence.startswith("the child was killed by SIGABRT: terminate called")

    def test_a_hanging_child_is_killed_with_its_children(self, machine):
        start = time.monotonic()
        measurement = machine("hang", timeout_seconds=1.5).measurement
        assert time.monotonic() - start < 15
        assert measurement.status is Status.TIMEOUT
        assert measurement.evidence.startswith("no result after 1.5 s: pids ")
        assert measurement.device_used_bytes == PEAK
        pids = [int(text) for text in re.findall(r"\d+", measurement.evidence.partition("pids")[2])]
        assert len(pids) == 2
        assert wait_until(lambda: not any(map(alive, pids)), 2)

    def test_a_child_may_exit_on_sigterm(self, machine):
        measurement = machine("polite_hang", timeout_seconds=1.5).measurement
        assert (measurement.status, measurement.evidence) == (Status.TIMEOUT, "no result after 1.5 s: told to end")

    def test_processes_that_a_child_leaves_behind_are_killed(self, machine):
        start = time.monotonic()
        outcome = machine("leave_another")
        assert time.monotonic() - start < 10
        assert outcome.measurement.status is Status.OK
        assert wait_until(lambda: not alive(int(outcome.versions["other"])), 2)

    @pytest.mark.parametrize(
        ("mode", "evidence"),
        [
            ("killed", "the child was killed by SIGKILL: the last words"),
            ("not_a_result", "the child's answer is not a result (reserved_bytes is 'much')"),
            ("unknown_status", "the child's answer is not a result ('fine' is not a valid Status)"),
        ],
    )
    def test_a_crash_has_evidence(self, machine, mode, evidence):
        measurement = machine(mode).measurement
        assert (measurement.status, measurement.evidence) == (Status.CRASHED, evidence)

    @pytest.mark.parametrize(
        ("mode", "reason"),
        [
            ("die_early", "the child ended with exit code 7: ImportError: libcudart.so.12"),
            ("garbage", r"the child's answer is not a report (b'\xff\x00 not json')"),
            ("endless", "the child's answer is too long (over 1048576 bytes)"),
        ],
    )
    def test_a_child_without_a_context_ends_the_build(self, machine, mode, reason):
        with pytest.raises(UserError, match=re.escape(f"{reason}: fix torch or the driver")):
            machine(mode)

    def test_long_output_neither_hangs_nor_hides_the_last_line(self, machine):
        measurement = machine("flood").measurement
        assert measurement.status is Status.CRASHED
        assert measurement.evidence.startswith("the child ended with exit code 5: ")
        assert measurement.evidence.endswith("the last line")
        assert len(measurement.evidence) <= 500
        assert machine("flood_and_finish").measurement.status is Status.OK

    def test_an_error_of_all_specs_ends_the_run(self, machine):
        with pytest.raises(UserError, match="expected a torch for CUDA"):
            machine("refuse")

    def test_a_lost_gpu_ends_the_run_and_the_child(self, machine):
        start = time.monotonic()
        with pytest.raises(GpuLostError, match="GPU-a"):
            machine("lost")
        assert time.monotonic() - start < 10


class TestOtherProcesses:
    def test_a_busy_gpu_is_refused_with_its_processes(self, driver):
        driver.stub.gpu(used=2 * GIB).process(4711, 2 * GIB).write()
        with pytest.raises(UserError, match=r"found pid 4711 with 2048 MiB on GPU-a: .*backend.on_busy=record"):
            Stubbed(fake("ok"), driver).measure(SPEC)

    def test_memory_of_other_processes_is_recorded(self, driver):
        driver.stub.gpu(used=2 * GIB).process(4711, 2 * GIB).write()  # unchanged during the run
        measurement = Stubbed(fake("ok", on_busy="record"), driver).measure(SPEC).measurement
        assert measurement.status is Status.OK
        assert (measurement.alone, measurement.others_bytes) == (False, 2 * GIB)
        assert measurement.device_used_bytes == measurement.process_bytes == PEAK

    def test_a_process_with_unknown_memory_is_recorded(self, driver):
        driver.stub.gpu().process(4711, -1).write()
        measurement = Stubbed(fake("ok", on_busy="record"), driver).measure(SPEC).measurement
        assert (measurement.alone, measurement.others_bytes) == (False, None)

    def test_memory_without_a_process_counts_as_busy(self, driver):
        driver.stub.gpu(used=2 * GIB).write()
        with pytest.raises(UserError, match="2048 MiB of a process that NVML does not list"):
            Stubbed(fake("ok"), driver).measure(SPEC)

    def test_a_process_that_starts_during_the_run_is_recorded(self, machine):
        measurement = machine("visited").measurement
        assert (measurement.alone, measurement.others_bytes) == (False, 300 * MIB)
        assert measurement.device_used_bytes == PEAK  # of the process; the device's growth includes the other one


@pytest.mark.parametrize(
    ("estimate", "held"), [(499 * MIB, False), (500 * MIB, True), (501 * MIB, True)]
)  # at the estimate itself the allocator empties its cache and continues
def test_an_estimate_is_tried_as_a_cap(driver, estimate, held):
    driver.stub.gpu().write()
    measurement = Stubbed(fake("capped", Estimates(estimate)), driver).measure(SPEC).measurement
    assert measurement.status is Status.OK  # of the first run
    assert (measurement.cap_bytes, measurement.cap_held) == (estimate, held)


@dataclass
class Fails(Estimates):
    reserved_bytes: int = 0

    def measure(self, spec):
        raise NotImplementedError("no rule for this operator")


def test_a_failing_estimator_loses_no_measurement(driver):
    driver.stub.gpu().write()
    measurement = Stubbed(fake("ok", Fails()), driver).measure(SPEC).measurement
    assert (measurement.status, measurement.device_used_bytes, measurement.cap_bytes, measurement.cap_held) == (
        Status.OK,
        PEAK,
        None,
        None,
    )


def test_the_child_sees_one_gpu_and_no_variables_that_change_memory(driver):
    driver.stub.gpu().write()
    backend = Stubbed(fake("environment", allocator="expandable_segments:True"), driver)
    unsafe = {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUDA_LAUNCH_BLOCKING": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:x",
    }
    versions = backend.call("measure", SPEC, **unsafe).versions
    assert versions["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert versions["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert versions["CUBLAS_WORKSPACE_CONFIG"] == versions["CUDA_LAUNCH_BLOCKING"] == ""


def test_without_a_driver_the_virtual_backend_is_named(driver, tmp_path):
    driver.stub.add("init 12").write()
    with pytest.raises(NoDriverError, match="use backend=virtual"):
        Stubbed(fake("ok"), driver).measure(SPEC)


class TestSeveralGpus:
    """The local executor pins one child to each GPU."""

    RUN = """
import json
from stubbed_cuda import fake
from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.jobs.families import make_spec
from vramcast.virtual_gpu.training.setup import TrainingSetup
if __name__ == "__main__":
    specs = [make_spec("mlp", {network}, TrainingSetup(batch_size=size)) for size in range(1, 7)]
    outcomes = [outcome for _, outcome in LocalExecutor(8, 60).run(fake("meet"), specs)]
    print(json.dumps([[outcome.measurement.status, outcome.gpu_uuid] for outcome in outcomes]))
""".replace("{network}", repr(MLP))

    def outcomes(self, driver, **environment):
        script = driver.folder / "several.py"
        script.write_text(self.RUN)
        result = driver.run(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", **environment)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def test_children_run_at_the_same_time_on_all_visible_free_gpus(self, driver):
        stub = driver.stub.gpu().gpu(uuid="GPU-b").gpu(uuid="GPU-c", used=GIB).gpu(uuid="GPU-d")
        stub.process(4711, GIB, uuid="GPU-c").write()
        outcomes = self.outcomes(driver, CUDA_VISIBLE_DEVICES="GPU-b,GPU-c,GPU-a")
        assert {status for status, _ in outcomes} == {"ok"}
        assert {uuid for _, uuid in outcomes} == {"GPU-a", "GPU-b"}

    def test_mig_instances_are_devices(self, driver):
        driver.stub.gpu(mig=1).instance(0, "MIG-x").instance(0, "MIG-y").write()
        assert {uuid for _, uuid in self.outcomes(driver)} == {"MIG-x", "MIG-y"}

    def test_a_lane_is_the_backend_on_one_gpu(self, driver):
        driver.stub.gpu().gpu(uuid="GPU-b").write()
        lanes = Stubbed(fake("ok", epochs=3), driver).call("lanes")
        assert [lane.settings.gpu for lane in lanes] == ["GPU-a", "GPU-b"]
        assert {lane.settings.epochs for lane in lanes} == {3}
        (lane,) = Stubbed(fake("ok", gpu=1), driver).call("lanes")
        assert lane.settings.gpu == "GPU-b"


class TestBuild:
    """`vramcast build backend=cuda`, from the command line to the rows."""

    def build(self, driver, *words, **environment):
        code = "import sys; from vramcast.commands.build.build_command import main; sys.exit(main(sys.argv[1:]))"
        out = driver.folder / "rows"
        return driver.run(code, "backend=cuda", "family=mlp", "n=2", f"out={out}", *words, **environment), out

    def test_a_missing_driver_is_one_error_and_writes_nothing(self, driver):
        library = driver.folder / "empty"
        library.mkdir()
        for executor in ("local", "serial"):
            result, out = self.build(driver, f"executor={executor}", LD_LIBRARY_PATH=str(without_driver(library)))
            assert result.returncode == 2
            assert result.stderr.startswith(
                "vramcast build: expected an NVIDIA driver for a GPU, found no libnvidia-ml"
            )
            assert "backend=virtual" in result.stderr
            assert not out.exists()

    def test_a_busy_gpu_is_one_error(self, driver):
        driver.stub.gpu(used=GIB).process(4711, GIB).write()
        result, out = self.build(driver)
        assert result.returncode == 2
        assert "found pid 4711 with 1024 MiB on GPU-a" in result.stderr
        assert not out.exists()


def test_a_row_keeps_the_values_of_a_gpu(machine):
    row = make_row(fake("ok"), SPEC, machine("ok"), 7, {"torch": "2"})
    assert (row.provenance.origin, row.provenance.backend) == ("measured", "cuda")
    assert (row.provenance.device, row.provenance.gpu_uuid) == ("NVIDIA A100-SXM4-40GB", "GPU-a")
    assert row.provenance.versions["driver"] == "555.42.06"
    assert row.provenance.versions["torch"] == "2"
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_rows_without_gpu_fields_can_be_read():
    values = make_row(fake("ok"), SPEC, BackendResult(Measurement(status=Status.OK)), 7, {}).to_json()
    for name in ("process_bytes", "alone", "others_bytes", "samples", "longest_gap_ms", "cap_bytes", "cap_held"):
        del values["measurement"][name]
    del values["provenance"]["gpu_uuid"]
    assert Row.from_json(values).measurement == Measurement(status=Status.OK)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"interval_ms": 21}, "interval_ms up to 20"),
        ({"interval_ms": 0}, "interval_ms"),
        ({"timeout_seconds": 0}, "over 0 s"),
        ({"timeout_seconds": "long"}, "over 0 s"),
        ({"on_busy": "fight"}, "on_busy"),
        ({"epochs": 0}, "epochs"),
        ({"allocator": 7}, "allocator"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        CudaSettings(**settings)
