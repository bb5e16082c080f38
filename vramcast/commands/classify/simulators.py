"""Where a request is simulated: in a child process if it runs code, in this process if it is a spec."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

from vramcast.error_words import message_of
from vramcast.errors import UserError
from vramcast.jobs.job_request import JobRequest
from vramcast.jobs.network_files.transformers_config import is_transformers_config
from vramcast.jobs.spec import Spec
from vramcast.jobs.targets import (
    GPUMEMNET,
    LIBRARIES,
    BuildRequest,
    Target,
    is_document,
    parse_shape,
    read_document,
)
from vramcast.simulation.sandbox.client import ChildSimulator

if TYPE_CHECKING:  # the child starts before this process imports torch
    from vramcast.jobs.network_files.description import NetworkDescription
    from vramcast.simulation.simulator import JobSimulator, Simulator

_MOST_NETWORKS = 40
"""Networks of libraries that one child builds, because libraries keep some memory of each."""


Subject: TypeAlias = "NetworkDescription | JobSimulator"


def described(target: str, inputs: tuple[tuple[int, ...], ...] = ()) -> "Spec | NetworkDescription | Target | None":
    """Return what a target names without code of a user: a spec, layers, or a configuration of transformers.

    None stands for a target that must be built by running code.
    """
    if target.startswith(GPUMEMNET):
        from vramcast.jobs.families.gpumemnet import spec_of_filename  # noqa: PLC0415

        return spec_of_filename(target.removeprefix(GPUMEMNET))
    if not is_document(target):
        return None
    from vramcast.jobs.network_files.reading import read_network_file, read_network_value  # noqa: PLC0415

    is_yaml = target.endswith((".yaml", ".yml"))
    contents = read_network_value(read_document(target), inputs) if is_yaml else read_network_file(Path(target), inputs)
    if not isinstance(contents, Mapping):
        return contents
    if is_transformers_config(contents):
        return Target(target, "hf", str(Path(target).resolve()))
    return _checked(Spec.from_json(contents))


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

    def start(self, request: JobRequest) -> Subject:
        """Return a simulator of the request's job, which may still be building it, or a description of its layers."""
        description = described(request.target, tuple(parse_shape(text)[0] for text in request.input))
        if description is None or isinstance(description, Target):
            child = self._building(request.build_request(description))
            return child.describe(request.options) if request.fast or description else child
        is_spec = isinstance(description, Spec)
        for name in ("inputs", "step", "packed", "keep_output", "args", "python", *(["input"] if is_spec else [])):
            if value := getattr(request, name):
                raise UserError(f"expected no {name} beside {request.target}, found {value!r}: leave it out")
        if isinstance(description, Spec):
            simulator = _local(description)
            return simulator.describe(request.options) if request.fast else simulator
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


def _local(spec: Spec) -> "Simulator":
    from vramcast.jobs.job import SpecJob  # noqa: PLC0415
    from vramcast.simulation.simulator import Simulator  # noqa: PLC0415

    return Simulator(SpecJob(spec))
