"""The parent's side of a measurement: sampling, limits, clean-up, with a child that plays and a stub for a card."""

import json
import re
import time
from dataclasses import dataclass

import pytest
from fake_child import CONTEXT, MIB, PEAK
from nvml_stub import GIB, NOT_SUPPORTED, without_driver
from scripted_backend import alive, wait_until
from stubbed_cuda import Estimates, Stubbed, fake

from vramcast.dataset_builder.families import make_spec
from vramcast.dataset_builder.measure import BackendResult
from vramcast.dataset_builder.measure.cuda.backend import CudaSettings
from vramcast.dataset_builder.measure.nvml import GpuLostError, NoDriverError
from vramcast.dataset_builder.pipeline import make_row
from vramcast.dataset_builder.schema import Row
from vramcast.errors import UserError
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training_setup import TrainingSetup

MLP = {"arch": "uniform", "input_features": 64, "output_features": 10, "depth": 2}
SPEC = make_spec("mlp", MLP, TrainingSetup(batch_size=8, last_batch_size=3))


@pytest.fixture
def machine(driver):
    """A machine with one free card, on which a child plays a mode."""
    driver.card.gpu().write()

    def measure(mode, estimator=None, **settings):
        return Stubbed(fake(mode, estimator, **settings), driver).measure(SPEC)

    return measure


class TestFigures:
    def test_peaks_are_seen_from_outside_and_told_from_inside(self, machine):
        outcome = machine("ok")
        found = outcome.measurement
        assert found.status is Status.OK
        assert found.evidence is None
        assert (found.requested_bytes, found.allocated_bytes, found.reserved_bytes) == (1, 2, 500 * MIB)
        assert found.device_used_bytes == found.process_bytes == PEAK
        assert found.breakdown == {"context": CONTEXT, "libraries": 100 * MIB, "allocator": 500 * MIB}
        assert (found.alone, found.others_bytes) == (True, 0)
        assert (outcome.device, outcome.gpu_uuid) == ("NVIDIA A100-SXM4-40GB", "GPU-a")
        assert outcome.versions == {"driver": "555.42.06", "driver_cuda": "12.5", "cuda": "12.4"}

    def test_the_card_is_looked_at_often_enough(self, machine):
        found = machine("ok", interval_ms=10).measurement
        assert found.samples >= 6  # in the 60 ms of the peak alone, before the context, and after
        assert 10 <= found.longest_gap_ms < 500  # of a busy test machine; a card's host has cores to spare

    def test_where_processes_are_not_told_the_device_s_growth_counts(self, driver):
        driver.card.gpu(used=90 * MIB).add(f"processes GPU-a {NOT_SUPPORTED}").write()
        found = Stubbed(fake("ok"), driver).measure(SPEC).measurement
        assert found.process_bytes is None
        assert found.device_used_bytes == PEAK
        assert found.others_bytes is None

    def test_in_a_container_the_new_process_is_the_child(self, machine):
        found = machine("host_pid").measurement
        assert found.process_bytes == PEAK
        assert found.others_bytes == 0

    def test_a_full_card_makes_no_peak_that_is_a_need(self, machine):
        found = machine("full").measurement
        assert found.status is Status.CENSORED
        assert "emptied its cache 3 times" in found.evidence

    def test_figures_of_another_card_are_refused(self, machine):
        with pytest.raises(UserError, match="expected CUDA to show GPU-a, found GPU-ffff"):
            machine("another_card")


class TestMisbehaviour:
    def test_out_of_memory_is_an_outcome(self, machine):
        found = machine("oom").measurement
        assert found.status is Status.OOM
        assert "CUDA out of memory. Tried to allocate 2.00 GiB" in found.evidence
        assert found.reserved_bytes == 7
        assert found.device_used_bytes == PEAK

    def test_out_of_memory_that_ends_the_process_is_the_same(self, machine):
        found = machine("oom_abort").measurement
        assert found.status is Status.OOM
        assert found.evidence.startswith("the child was killed by SIGABRT: terminate called")

    def test_a_hanging_child_is_ended_with_all_that_it_started(self, machine):
        start = time.monotonic()
        found = machine("hang", timeout_seconds=1.5).measurement
        assert time.monotonic() - start < 15
        assert found.status is Status.TIMEOUT
        assert found.evidence.startswith("no result after 1.5 s: pids ")
        assert found.device_used_bytes == PEAK
        pids = [int(text) for text in re.findall(r"\d+", found.evidence.partition("pids")[2])]
        assert len(pids) == 2
        assert wait_until(lambda: not any(map(alive, pids)), 2)

    def test_a_child_may_leave_by_itself(self, machine):
        found = machine("polite_hang", timeout_seconds=1.5).measurement
        assert (found.status, found.evidence) == (Status.TIMEOUT, "no result after 1.5 s: told to end")

    def test_what_a_child_leaves_behind_is_ended(self, machine):
        start = time.monotonic()
        outcome = machine("leave_another")
        assert time.monotonic() - start < 10
        assert outcome.measurement.status is Status.OK
        assert wait_until(lambda: not alive(int(outcome.versions["other"])), 2)

    @pytest.mark.parametrize(
        ("mode", "evidence"),
        [
            ("killed", "the child was killed by SIGKILL: the last words"),
            ("not_a_result", "the child's answer is no result (reserved_bytes is 'much')"),
            ("unknown_status", "the child's answer is no result ('fine' is not a valid Status)"),
        ],
    )
    def test_a_crash_has_its_evidence(self, machine, mode, evidence):
        found = machine(mode).measurement
        assert (found.status, found.evidence) == (Status.CRASHED, evidence)

    @pytest.mark.parametrize(
        ("mode", "found"),
        [
            ("die_early", "the child ended with exit code 7: ImportError: libcudart.so.12"),
            ("garbage", r"the child's answer is no report (b'\xff\x00 not json')"),
            ("endless", "the child's answer has no end (over 1048576 bytes)"),
        ],
    )
    def test_a_child_that_never_has_a_context_ends_the_build(self, machine, mode, found):
        with pytest.raises(UserError, match=re.escape(f"{found}: mend torch or the driver")):
            machine(mode)

    def test_a_flood_of_words_neither_hangs_nor_hides_the_last(self, machine):
        found = machine("flood").measurement
        assert found.status is Status.CRASHED
        assert found.evidence.startswith("the child ended with exit code 5: ")
        assert found.evidence.endswith("the last line")
        assert len(found.evidence) <= 500
        assert machine("flood_and_finish").measurement.status is Status.OK

    def test_what_concerns_all_specs_ends_the_run(self, machine):
        with pytest.raises(UserError, match="expected a torch for CUDA"):
            machine("refuse")

    def test_a_lost_card_ends_the_run_and_the_child(self, machine):
        start = time.monotonic()
        with pytest.raises(GpuLostError, match="GPU-a"):
            machine("lost")
        assert time.monotonic() - start < 10


class TestOthers:
    def test_a_busy_card_is_refused_with_who_is_there(self, driver):
        driver.card.gpu(used=2 * GIB).process(4711, 2 * GIB).write()
        with pytest.raises(UserError, match=r"found pid 4711 with 2048 MiB on GPU-a: .*backend.on_busy=record"):
            Stubbed(fake("ok"), driver).measure(SPEC)

    def test_or_what_they_hold_is_recorded(self, driver):
        driver.card.gpu(used=2 * GIB).process(4711, 2 * GIB).write()  # which stays as it is
        found = Stubbed(fake("ok", on_busy="record"), driver).measure(SPEC).measurement
        assert found.status is Status.OK
        assert (found.alone, found.others_bytes) == (False, 2 * GIB)
        assert found.device_used_bytes == found.process_bytes == PEAK

    def test_who_holds_an_unknown_amount_is_in_the_row_too(self, driver):
        driver.card.gpu().process(4711, -1).write()
        found = Stubbed(fake("ok", on_busy="record"), driver).measure(SPEC).measurement
        assert (found.alone, found.others_bytes) == (False, None)

    def test_memory_of_a_process_without_a_name_is_someone_s(self, driver):
        driver.card.gpu(used=2 * GIB).write()
        with pytest.raises(UserError, match="2048 MiB of a process that NVML does not name"):
            Stubbed(fake("ok"), driver).measure(SPEC)

    def test_who_comes_during_the_run_is_in_the_row(self, machine):
        found = machine("visited").measurement
        assert (found.alone, found.others_bytes) == (False, 300 * MIB)
        assert found.device_used_bytes == PEAK  # the process's, for the device's is not its own


@pytest.mark.parametrize(
    ("estimate", "held"), [(499 * MIB, False), (500 * MIB, True), (501 * MIB, True)]
)  # at the estimate itself the allocator empties its cache, and lives
def test_an_estimate_is_tried_as_a_cap(driver, estimate, held):
    driver.card.gpu().write()
    found = Stubbed(fake("capped", Estimates(estimate)), driver).measure(SPEC).measurement
    assert found.status is Status.OK  # that of the first run
    assert (found.cap_bytes, found.cap_held) == (estimate, held)


@dataclass
class Fails(Estimates):
    reserved_bytes: int = 0

    def measure(self, spec):
        raise NotImplementedError("no rule for this operator")


def test_an_estimator_that_fails_costs_no_measurement(driver):
    driver.card.gpu().write()
    found = Stubbed(fake("ok", Fails()), driver).measure(SPEC).measurement
    assert (found.status, found.device_used_bytes, found.cap_bytes, found.cap_held) == (Status.OK, PEAK, None, None)


def test_the_child_sees_one_card_and_no_setting_that_changes_figures(driver):
    driver.card.gpu().write()
    backend = Stubbed(fake("environment", allocator="expandable_segments:True"), driver)
    asked = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_CUDA_ALLOC_CONF": "backend:x"}
    versions = backend.call("measure", SPEC, **asked).versions
    assert versions["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert versions["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert versions["CUBLAS_WORKSPACE_CONFIG"] == versions["CUDA_LAUNCH_BLOCKING"] == ""


def test_without_a_driver_the_virtual_backend_is_named(driver, tmp_path):
    driver.card.add("init 12").write()
    with pytest.raises(NoDriverError, match="use backend=virtual"):
        Stubbed(fake("ok"), driver).measure(SPEC)


class TestSeveralCards:
    """The local executor pins one child to each GPU."""

    RUN = """
import json
from stubbed_cuda import fake
from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.dataset_builder.families import make_spec
from vramcast.virtual_gpu.training_setup import TrainingSetup
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

    def test_children_run_at_the_same_time_on_all_that_are_visible_and_free(self, driver):
        card = driver.card.gpu().gpu(uuid="GPU-b").gpu(uuid="GPU-c", used=GIB).gpu(uuid="GPU-d")
        card.process(4711, GIB, uuid="GPU-c").write()
        found = self.outcomes(driver, CUDA_VISIBLE_DEVICES="GPU-b,GPU-c,GPU-a")
        assert {status for status, _ in found} == {"ok"}
        assert {uuid for _, uuid in found} == {"GPU-a", "GPU-b"}

    def test_instances_of_a_card_are_devices_too(self, driver):
        driver.card.gpu(mig=1).instance(0, "MIG-x").instance(0, "MIG-y").write()
        assert {uuid for _, uuid in self.outcomes(driver)} == {"MIG-x", "MIG-y"}

    def test_a_lane_is_the_backend_on_one_card(self, driver):
        driver.card.gpu().gpu(uuid="GPU-b").write()
        lanes = Stubbed(fake("ok", epochs=3), driver).call("lanes")
        assert [lane.settings.gpu for lane in lanes] == ["GPU-a", "GPU-b"]
        assert {lane.settings.epochs for lane in lanes} == {3}
        (lane,) = Stubbed(fake("ok", gpu=1), driver).call("lanes")
        assert lane.settings.gpu == "GPU-b"


class TestBuild:
    """`vramcast build backend=cuda`, from the words to the rows."""

    def build(self, driver, *words, **environment):
        code = "import sys; from vramcast.dataset_builder.build_command import main; sys.exit(main(sys.argv[1:]))"
        out = driver.folder / "rows"
        return driver.run(code, "backend=cuda", "family=mlp", "n=2", f"out={out}", *words, **environment), out

    def test_no_driver_is_a_sentence_and_leaves_nothing_behind(self, driver):
        library = driver.folder / "empty"
        library.mkdir()
        for executor in ("local", "serial"):
            found, out = self.build(driver, f"executor={executor}", LD_LIBRARY_PATH=str(without_driver(library)))
            assert found.returncode == 2
            assert found.stderr.startswith("vramcast build: expected an NVIDIA driver for a GPU, found no libnvidia-ml")
            assert "backend=virtual" in found.stderr
            assert not out.exists()

    def test_a_busy_card_is_a_sentence_too(self, driver):
        driver.card.gpu(used=GIB).process(4711, GIB).write()
        found, out = self.build(driver)
        assert found.returncode == 2
        assert "found pid 4711 with 1024 MiB on GPU-a" in found.stderr
        assert not out.exists()


def test_a_row_keeps_what_only_a_card_tells(machine):
    row = make_row(fake("ok"), SPEC, machine("ok"), 7, {"torch": "2"})
    assert (row.provenance.origin, row.provenance.backend) == ("measured", "cuda")
    assert (row.provenance.device, row.provenance.gpu_uuid) == ("NVIDIA A100-SXM4-40GB", "GPU-a")
    assert row.provenance.versions["driver"] == "555.42.06"
    assert row.provenance.versions["torch"] == "2"
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_rows_from_before_cards_can_be_read():
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
