"""The contract of executors, and the outcomes of specs that produced no result."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable

from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.errors import UntraceableError, UserError
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import EVIDENCE_LENGTH, Measurement, Status


class Executor(ABC):
    """Measures specs; the caller sees exactly one outcome of each."""

    @abstractmethod
    def run(self, backend: Backend, specs: Iterable[Spec]) -> Generator[tuple[Spec, BackendResult], None, None]:
        """Yield every spec with its outcome, in the order in which they finish.

        Specs are read a few at a time, so `specs` may be infinite. An exception, a dead worker and a timeout are
        outcomes of a spec. `UserError`, and `WorkerError` for workers that cannot start, end the run, because they
        affect all specs. Closing the generator ends all workers.
        """


def attempt(backend: Backend, spec: Spec) -> BackendResult:
    """Measure one spec; an exception is an outcome unless it affects all specs."""
    try:
        return backend.measure(spec)
    except UntraceableError as error:
        return crashed(describe(error))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        return crashed(describe(error))


def describe(error: BaseException) -> str:
    """Return an exception as one line, 'TypeName: message'."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")[:EVIDENCE_LENGTH]


def crashed(evidence: str) -> BackendResult:
    """Return the outcome of a spec that raised or killed its worker."""
    return BackendResult(Measurement(status=Status.CRASHED, evidence=evidence))


def timed_out(limit_seconds: float) -> BackendResult:
    """Return the outcome of a spec that exceeded the time limit."""
    return BackendResult(Measurement(status=Status.TIMEOUT, evidence=f"no result after {limit_seconds:g} s"))
