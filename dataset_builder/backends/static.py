"""The static estimate as a backend: rows that say what shapes alone predict."""

from dataclasses import asdict

from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.jobs.analysis.static import static_estimate
from vramcast.jobs.job import table_of
from vramcast.jobs.spec import Spec, StaticEstimate
from vramcast.virtual_gpu.measurement import Measurement, Status


def static_of(spec: Spec) -> StaticEstimate:
    """Return the static estimate of a spec's network and training."""
    return static_estimate(spec.training, table_of(spec))


class StaticBackend(Backend):
    """Reports the static estimate (SGV) as the allocated peak."""

    name = "static"
    origin = "static"

    def measure(self, spec: Spec) -> BackendResult:
        """Add up the parts of the layer table."""
        estimate = static_of(spec)
        breakdown = {name.removesuffix("_bytes"): value for name, value in asdict(estimate).items()}
        return BackendResult(Measurement(status=Status.OK, allocated_bytes=estimate.total_bytes, breakdown=breakdown))
