"""The virtual GPU as a backend: trace the training step, lower it onto a device, replay it through the allocator."""

import time
from dataclasses import replace

from vramcast.dataset_builder.measure._base import Backend, Outcome
from vramcast.dataset_builder.measure.static import static_of
from vramcast.dataset_builder.schema import Spec
from vramcast.dataset_builder.subject import subject_of
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.session import trace_training
from vramcast.virtual_gpu.simulate import simulate
from vramcast.virtual_gpu.trace import Trace
from vramcast.virtual_gpu.training_step import random_inputs


class VirtualBackend(Backend):
    """Simulates: no figure of this backend was read off a card."""

    name = "virtual"
    origin = "simulated"

    def __init__(self, profile: DeviceProfile, options: AllocatorOptions | None = None) -> None:
        self.profile = profile
        self.options = options or AllocatorOptions()
        self.device = profile.name

    def measure(self, spec: Spec) -> Outcome:
        """Trace and replay a spec."""
        start = time.perf_counter()
        static = static_of(spec)
        measurement = simulate(trace_spec(spec, self.profile.compute_capability), self.profile, self.options)
        seconds = round(time.perf_counter() - start, 4)
        return Outcome(static, replace(measurement, seconds=seconds))


def trace_spec(spec: Spec, compute_capability: float = 8.0) -> Trace:
    """The trace of a spec's training on cards of that capability."""
    subject, inputs = subject_of(spec)
    shapes = [(item.shape, item.vocabulary) for item in inputs]
    return trace_training(
        subject,
        lambda size: random_inputs(shapes, size, spec.training.dtype, "meta"),
        spec.training,
        compute_capability=compute_capability,
    )
