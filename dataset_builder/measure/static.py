"""The static estimate as a backend: no measurement, but rows that say what shapes alone would predict."""

from dataclasses import asdict

from dataset_builder.analysis.static import static_estimate
from dataset_builder.filters import Rejected, check
from dataset_builder.measure._base import Backend, Outcome
from dataset_builder.schema import Measurement, Spec, Status


class StaticBackend(Backend):
    """Takes SGV for the allocated peak."""

    name = "static"
    origin = "static"

    def measure(self, spec: Spec) -> Outcome:
        """Add up the parts that the layer table shows."""
        table = check(spec)
        if isinstance(table, Rejected):
            raise TypeError(f"the filter rejects this spec: {table.reason}")
        estimate = static_estimate(spec.training, table)
        breakdown = {name.removesuffix("_bytes"): value for name, value in asdict(estimate).items()}
        measurement = Measurement(status=Status.OK, allocated_bytes=estimate.total_bytes, breakdown=breakdown)
        return Outcome(estimate, measurement)
