"""Where a request is looked at: a child process for whatever runs code, this one for specs, no one for layer tables."""

from typing import TYPE_CHECKING, Self

from vramcast.dataset_builder.jobs.targets import GPUMEMNET, LIBRARIES, Wanted, is_document, read_document
from vramcast.dataset_builder.schema import LayerTable, Spec
from vramcast.dataset_builder.simulation.client import ChildInspection
from vramcast.errors import UserError
from vramcast.models.answering.requests import Request

if TYPE_CHECKING:  # a child is started before this process imports torch
    from vramcast.dataset_builder.simulation.inspector import Inspection

_LIFE = 40
"""Networks of libraries that one child looks at: libraries keep some memory of each."""


def described(target: str) -> Spec | LayerTable | None:
    """The spec or the layer table that a target stands for; None for one that must be built by running code."""
    if target.startswith(GPUMEMNET):
        from vramcast.dataset_builder.families.gpumemnet import spec_of_filename  # noqa: PLC0415

        return spec_of_filename(target.removeprefix(GPUMEMNET))
    if not is_document(target):
        return None
    value = read_document(target)
    if isinstance(value, dict) and {"family", "network", "training"} <= value.keys():
        return Spec.from_json(value)
    from vramcast.dataset_builder.jobs.layer_tables import read_table  # noqa: PLC0415

    return read_table(value)


class Sessions:
    """Inspections one after the other; a child is kept as long as what comes next may run in it."""

    def __init__(self, timeout_seconds: float, memory_mib: int) -> None:
        self._limits = (timeout_seconds, memory_mib)
        self._child: ChildInspection | None = None
        self._wanted: Wanted | None = None
        self._lived = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.close()
        self._child, self._wanted, self._lived = None, None, 0

    def start(self, request: Request) -> "LayerTable | Inspection":
        """Begin to look at what a request names: a table is all that there is to it, a child builds meanwhile."""
        found = described(request.target)
        if found is None:
            return self._building(request.wanted())
        for name in ("input", "inputs", "step", "args"):
            if value := getattr(request, name):
                raise UserError(f"expected no {name} beside {request.target}, found {value!r}: leave it out")
        if not isinstance(found, LayerTable):
            return _local(found)
        request.check_batch()
        return found

    def _building(self, wanted: Wanted) -> ChildInspection:
        library = wanted.target.kind in LIBRARIES
        if self._child is not None and wanted == self._wanted:
            return self._child
        tenant = self._wanted is not None and self._wanted.target.kind in LIBRARIES
        if self._child is None or not library or not tenant or self._lived >= _LIFE or not self._child.alive:
            self.close()
            self._child = ChildInspection(wanted, *self._limits)
        else:
            self._child.turn_to(wanted)
        self._wanted, self._lived = wanted, self._lived + 1
        return self._child


def _local(spec: Spec) -> "Inspection":
    from vramcast.dataset_builder.jobs.job import SpecJob  # noqa: PLC0415
    from vramcast.dataset_builder.simulation.inspector import LocalInspection  # noqa: PLC0415

    return LocalInspection(SpecJob(spec))
