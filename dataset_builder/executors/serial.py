"""Measure specs one after the other in this process."""

from collections.abc import Generator, Iterable

from vramcast.dataset_builder.backends._base import Backend, BackendResult
from vramcast.dataset_builder.executors._base import Executor, attempt
from vramcast.jobs.spec import Spec


class SerialExecutor(Executor):
    """Measures in this process, for debugging and for machines with one core.

    There is no time limit, and a spec that kills its process ends the run. `LocalExecutor(workers=1)` handles both.
    """

    def run(self, backend: Backend, specs: Iterable[Spec]) -> Generator[tuple[Spec, BackendResult], None, None]:
        """Measure each spec when the caller requests the next outcome."""
        for spec in specs:
            yield spec, attempt(backend, spec)
