"""What every executor owes the pipeline, and the outcomes of specs that came to no result."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable

from vramcast.dataset_builder.measure._base import Backend, BackendResult
from vramcast.dataset_builder.schema import Spec
from vramcast.errors import UntraceableError, UserError
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH, Measurement, Status


class Executor(ABC):
    """Measures many specs, each exactly once as far as the caller can tell."""

    @abstractmethod
    def run(self, backend: Backend, specs: Iterable[Spec]) -> Generator[tuple[Spec, BackendResult], None, None]:
        """Yield every spec with its one outcome, in the order in which they finish.

        Specs are taken a few at a time, so `specs` may be endless. What a spec does is an outcome: an
        exception, a dead worker, a time limit. `UserError`, and `WorkerError` for workers that cannot start,
        end the run, since every other spec would meet them too. Closing the generator ends all workers.
        """


def attempt(backend: Backend, spec: Spec) -> BackendResult:
    """Measure one spec; whatever it raises is an outcome, except for what concerns all specs."""
    try:
        return backend.measure(spec)
    except UntraceableError as error:
        return crashed(describe(error))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        return crashed(describe(error))


def describe(error: BaseException) -> str:
    """An exception in a line, 'TypeName: message'."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")[:EVIDENCE_LENGTH]


def crashed(evidence: str) -> BackendResult:
    """The outcome of a spec that raised, or took its worker down."""
    return BackendResult(Measurement(status=Status.CRASHED, evidence=evidence))


def timed_out(limit_seconds: float) -> BackendResult:
    """The outcome of a spec that was ended because it ran out of time."""
    return BackendResult(Measurement(status=Status.TIMEOUT, evidence=f"no result after {limit_seconds:g} s"))
