"""Where a request is simulated: in a child process if it runs code, in this process if it is a spec."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Self

from vramcast.error_words import message_of
from vramcast.errors import UserError
from vramcast.jobs.job_request import JobRequest
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.jobs.targets import GPUMEMNET, LIBRARIES, BuildRequest, is_document, read_document
from vramcast.simulation.sandbox.client import ChildSimulator

if TYPE_CHECKING:  # the child starts before this process imports torch
    from vramcast.simulation.simulator import JobSimulator

_MOST_NETWORKS = 40
"""Networks of libraries that one child builds, because libraries keep some memory of each."""


def described(target: str) -> Spec | LayerTable | None:
    """Return the spec or the layer table that a target names, or None if it must be built by running code."""
    if target.startswith(GPUMEMNET):
        from vramcast.jobs.families.gpumemnet import spec_of_filename  # noqa: PLC0415

        return spec_of_filename(target.removeprefix(GPUMEMNET))
    if not is_document(target):
        return None
    value = read_document(target)
    if isinstance(value, dict) and {"family", "network", "training"} <= value.keys():
        return _checked(Spec.from_json(value))
    from vramcast.jobs.layer_tables import read_table  # noqa: PLC0415

    return read_table(value)


def _checked(spec: Spec) -> Spec:
    """Return a spec that has an id."""
    try:
        hash(spec)
    except (ValueError, TypeError, RecursionError) as error:  # infinity, a date of YAML, too many levels
        raise UserError(f"expected a spec of plain finite values, found {message_of(error)}: change it") from error
    return spec


class Simulators:
    """Starts simulators one after the other, and reuses a child process while that is safe."""

    def __init__(
        self,
        timeout_seconds: float,
        memory_mib: int,
        *,
        allow_network: bool = False,
        unprotected: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._start = partial(
            ChildSimulator,
            timeout_seconds=timeout_seconds,
            memory_mib=memory_mib,
            allow_network=allow_network,
            unprotected=unprotected,
            environment=environment,
        )
        self._child: ChildSimulator | None = None
        self._request: BuildRequest | None = None
        self._built = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._child is not None:
            self._child.close()
        self._child, self._request, self._built = None, None, 0

    def start(self, request: JobRequest) -> "LayerTable | JobSimulator":
        """Return a simulator of the request's job, which may still be building it, or its layer table."""
        description = described(request.target)
        if description is None:
            return self._building(request.build_request())
        for name in ("input", "inputs", "step", "packed", "keep_output", "args", "python"):
            if value := getattr(request, name):
                raise UserError(f"expected no {name} beside {request.target}, found {value!r}: leave it out")
        if not isinstance(description, LayerTable):
            return _local(description)
        request.check_batch()
        return description

    def _building(self, request: BuildRequest) -> ChildSimulator:
        if self._child is not None and request == self._request and self._child.alive:
            return self._child
        from_libraries = request.target.kind in LIBRARIES and (
            self._request is not None
            and self._request.target.kind in LIBRARIES
            and self._request.python == request.python
        )
        if self._child is not None and from_libraries and self._built < _MOST_NETWORKS and self._child.alive:
            self._child.build(request)
        else:
            self.close()
            self._child = self._start(request)
        self._request, self._built = request, self._built + 1
        return self._child


def _local(spec: Spec) -> "JobSimulator":
    from vramcast.jobs.job import SpecJob  # noqa: PLC0415
    from vramcast.simulation.simulator import Simulator  # noqa: PLC0415

    return Simulator(SpecJob(spec))
