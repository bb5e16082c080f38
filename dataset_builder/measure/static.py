"""The static estimate as a backend: no measurement, but rows that say what shapes alone would predict."""

from dataclasses import asdict

from vramcast.dataset_builder.analysis.static import static_estimate
from vramcast.dataset_builder.families import FAMILIES
from vramcast.dataset_builder.filters import Rejected, check
from vramcast.dataset_builder.measure._base import Backend, Outcome
from vramcast.dataset_builder.schema import Spec, StaticEstimate
from vramcast.virtual_gpu.measurement import Measurement, Status


def static_of(spec: Spec) -> StaticEstimate | None:
    """The static estimate of a spec that has a plan; networks of other libraries have none."""
    if spec.family not in FAMILIES:
        return None
    table = check(spec)
    if isinstance(table, Rejected):
        raise TypeError(f"the filter rejects this spec: {table.reason}")
    return static_estimate(spec.training, table)


class StaticBackend(Backend):
    """Takes SGV for the allocated peak."""

    name = "static"
    origin = "static"

    def measure(self, spec: Spec) -> Outcome:
        """Add up the parts that the layer table shows."""
        estimate = static_of(spec)
        if estimate is None:
            raise TypeError(f"there is no layer table of the family {spec.family}")
        breakdown = {name.removesuffix("_bytes"): value for name, value in asdict(estimate).items()}
        measurement = Measurement(status=Status.OK, allocated_bytes=estimate.total_bytes, breakdown=breakdown)
        return Outcome(estimate, measurement)
