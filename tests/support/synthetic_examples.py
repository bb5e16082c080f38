"""Examples of real networks with made-up measurements: the gap is a known function of the job, plus noise."""

import math
from collections.abc import Sequence

import numpy as np

from vramcast.jobs.families import make_spec
from vramcast.jobs.job import table_of
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.models.example import Example, Label
from vramcast.models.examples import example_of_table
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.training.setup import TrainingSetup

PROFILE = DeviceProfile(
    name="plain", title="Plain", total_mib=1096, driver_mib=96, compute_capability=8.0, context_mib=200, cudnn_mib=50
)
NOISE = 0.02


def mlp_spec(width: int = 256, depth: int = 3, batch: int = 32, **training: object) -> Spec:
    network = {"arch": "uniform", "input_features": width, "output_features": 10, "depth": depth}
    return make_spec("mlp", network, TrainingSetup(batch_size=batch, **training))


def cnn_spec(filters: int = 16, depth: int = 3, batch: int = 8, size: int = 32, **training: object) -> Spec:
    network = {
        "arch": "pyramid", "input_channels": 3, "input_size": size, "num_classes": 10, "depth": depth,
        "base_filters": filters, "norm": "batch",
    }  # fmt: skip
    return make_spec("cnn", network, TrainingSetup(batch_size=batch, **training))


def need_bytes(table: LayerTable, batch: int) -> int:
    return 20 * table.parameters + 8 * batch * table.activations + 22 * MIB


def simulation(need: int, profile: DeviceProfile, convolutions: bool) -> Measurement:
    """Return a made-up simulation, without tracing."""
    room = profile.capacity_bytes(convolutions)
    return Measurement(
        status=Status.OK if need <= room else Status.OOM,
        requested_bytes=int(0.8 * min(need, room)),
        allocated_bytes=int(0.9 * min(need, room)),
        reserved_bytes=min(need, room),
        breakdown={"workspace": int(0.1 * min(need, room)), "context": profile.overhead_bytes(convolutions)},
    )


def example_of(spec: Spec, noise: float = 0.0, profile: DeviceProfile = PROFILE) -> Example:
    """Return the label: jobs with small batches take a third more than simulated, others the simulated memory."""
    table = table_of(spec)
    need = need_bytes(table, spec.training.batch_size)
    found = simulation(need, profile, spec.family == "cnn")
    example = example_of_table(table, spec.training, profile, found, spec.family)
    gap = noise + (0.3 if spec.training.batch_size < 64 else 0.0)
    used_bytes = example.overhead_bytes + round(need * math.exp(gap))
    label = Label(min(used_bytes, example.capacity_bytes), fits=used_bytes < example.capacity_bytes)
    return Example(**{**vars(example), "id": spec.id, "group": spec.group, "label": label})


def mlp_examples(count: int, seed: int = 0) -> list[Example]:
    """Return distinct networks of 2 to 8 layers, a few of which do not fit."""
    random = np.random.default_rng(seed)
    drawn = {
        (int(random.uniform(64, 5000)), int(random.integers(1, 8)), int(random.integers(1, 256))): random.normal()
        for _ in range(count)
    }
    return [example_of(mlp_spec(*key), NOISE * noise) for key, noise in drawn.items()]


def without_labels(examples: Sequence[Example]) -> list[Example]:
    return [Example(**{**vars(example), "label": None}) for example in examples]
