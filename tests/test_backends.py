"""Every backend that trains a spec, on a card or as if on one, keeps one contract."""

import json
import pickle
from dataclasses import asdict, replace

import pytest
from stubbed_cuda import Estimates, Stubbed, fake

from vramcast.dataset_builder.backends.cuda.backend import CudaBackend, CudaSettings
from vramcast.dataset_builder.backends.static import static_of
from vramcast.dataset_builder.configuration import make_virtual
from vramcast.device.nvml import open_nvml
from vramcast.device.profiles import load_device
from vramcast.errors import UserError
from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

MIB = 2**20
MLP = {"arch": "uniform", "input_features": 1024, "output_features": 10, "depth": 4}
CNN = {
    "arch": "uniform", "input_channels": 3, "input_size": 32, "num_classes": 10, "depth": 3,
    "base_filters": 16, "norm": "batch",
}  # fmt: skip
TRANSFORMER = {
    "kind": "encoder", "vocabulary": 1000, "embedding_size": 128, "layers": 2, "heads": 4, "feed_forward_size": 256,
    "sequence_length": 32,
}  # fmt: skip


def spec(family="mlp", network=MLP, batch=64, **training) -> Spec:
    return make_spec(family, network, TrainingSetup(batch_size=batch, **training))


class BackendContract:
    """What holds for every backend that trains."""

    origin: str

    @pytest.fixture
    def backend(self, request):
        raise NotImplementedError

    def peaks(self, backend, item):
        found = backend.measure(item).measurement
        assert found.status is Status.OK, found.evidence
        return found

    @pytest.mark.parametrize(("family", "network"), [("mlp", MLP), ("cnn", CNN), ("transformer", TRANSFORMER)])
    def test_every_peak_holds_the_one_inside_it(self, backend, family, network):
        found = self.peaks(backend, spec(family, network, last_batch_size=3))
        assert 0 < found.requested_bytes <= found.allocated_bytes <= found.reserved_bytes < found.device_used_bytes
        assert found.peak_bytes == found.device_used_bytes
        assert found.reserved_bytes % (2 * MIB) == 0
        assert found.seconds > 0
        assert found.evidence is None

    def test_the_context_is_told_apart(self, backend):
        found = self.peaks(backend, spec())
        assert 0 < found.breakdown["context"] < found.device_used_bytes
        assert found.device_used_bytes - found.reserved_bytes >= found.breakdown["context"]

    def test_more_than_parameters_gradients_and_state_is_taken(self, backend):
        result, static = backend.measure(spec()), static_of(spec())
        assert static.parameter_bytes == 4 * (4 * (1024 * 1024 + 1024) + 10 * 1025)
        assert result.measurement.allocated_bytes > static.total_bytes - static.activation_bytes

    def test_a_larger_batch_takes_more(self, backend):
        small, large = (self.peaks(backend, spec(batch=size)) for size in (64, 8192))
        assert large.allocated_bytes > small.allocated_bytes + 8128 * 1024 * 4
        assert large.device_used_bytes > small.device_used_bytes

    def test_an_optimizer_with_state_takes_more(self, backend):
        plain, adam = (self.peaks(backend, spec(optimizer=name)).allocated_bytes for name in ("SGD", "Adam"))
        assert adam > plain + 4 * 4 * 1024 * 1024

    @pytest.mark.parametrize(
        "training",
        [
            {"autocast": "fp16"},
            {"dtype": "bf16", "implementation": "fused"},
            {"accumulate": 3, "checkpointing": True},
            {"dry_run_batch_size": 2, "prefetched_batches": 2},
        ],
    )
    def test_every_kind_of_training_runs(self, backend, training):
        self.peaks(backend, spec(**training))

    def test_out_of_memory_is_an_outcome(self, backend):
        found = backend.measure(spec(batch=2**22, network={**MLP, "input_features": 8192})).measurement
        assert found.status is Status.OOM
        assert "out of memory" in found.evidence

    def test_the_same_spec_takes_the_same(self, backend):
        first, second = (self.peaks(backend, spec()) for _ in range(2))
        for name in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
            assert getattr(first, name) == getattr(second, name)

    def test_it_says_what_kind_of_figure_it_gives(self, backend):
        assert backend.origin == self.origin

    def test_workers_can_be_sent_it(self, backend):
        sent = pickle.loads(pickle.dumps(backend))
        assert type(sent) is type(backend)


class _Played(Stubbed):
    """The CUDA backend, with the figures of the virtual GPU in place of a card's."""

    def measure(self, item):
        found = make_virtual(load_device("a100_40gb")).measure(item).measurement
        (self.driver.folder / "figures.json").write_text(json.dumps(asdict(found)))
        return super().measure(item)


class TestVirtual(BackendContract):
    origin = "simulated"

    @pytest.fixture
    def backend(self):
        return make_virtual(load_device("a100_40gb"))


class TestCudaWithoutACard(BackendContract):
    """The parent's half is real; the child plays what the virtual GPU says, and a stub is the driver."""

    origin = "measured"

    @pytest.fixture
    def backend(self, driver):
        driver.stub.gpu().write()
        return _Played(fake("recorded"), driver)


def _has_card() -> bool:
    try:
        with open_nvml() as nvml:
            return bool(nvml.gpus())
    except UserError:
        return False


@pytest.mark.gpu
@pytest.mark.skipif(not _has_card(), reason="needs a card with a driver")
class TestCuda(BackendContract):
    origin = "measured"

    @pytest.fixture
    def backend(self):
        return CudaBackend(CudaSettings(on_busy="record"))

    def test_the_row_names_its_card_and_software(self, backend):
        outcome = backend.measure(spec())
        assert outcome.gpu_uuid.startswith(("GPU-", "MIG-"))
        assert {"driver", "driver_cuda", "cuda", "cudnn"} <= outcome.versions.keys()
        assert outcome.measurement.longest_gap_ms < 100
        assert outcome.measurement.samples > 20

    def test_its_own_peak_is_enough_as_a_cap_and_half_of_it_is_not(self, backend):
        reserved_bytes = self.peaks(backend, spec(batch=8192)).reserved_bytes
        for cap_bytes, held in ((reserved_bytes, True), (reserved_bytes // 2, False)):
            capped = CudaBackend(backend.settings, Estimates(cap_bytes))
            found = capped.measure(spec(batch=8192)).measurement
            assert (found.cap_bytes, found.cap_held) == (cap_bytes, held)

    def test_a_time_limit_ends_the_child(self, backend):
        limited = CudaBackend(replace(backend.settings, timeout_seconds=0.5))
        assert limited.measure(spec()).measurement.status is Status.TIMEOUT
