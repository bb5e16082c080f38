"""`vramcast.VirtualGPU`: a virtual GPU for notebooks and tests, with the answer that `vramcast run` prints."""

import time
from types import TracebackType
from typing import Self

from vramcast.defaults import CHECKPOINT, RISK
from vramcast.device.profiles import DEFAULT_DEVICE, load_profile
from vramcast.errors import UserError
from vramcast.models.answer import Answer
from vramcast.models.predictor import Predictor, Question
from vramcast.simulation.scripts.observation import report_of
from vramcast.simulation.scripts.report import RunReport
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


class VirtualGPU:
    """A virtual GPU of a device profile, as a context.

    Example:
        >>> with vramcast.VirtualGPU("rtx_4090") as gpu:
        ...     network = torch.nn.Linear(1024, 1024).cuda()
        ...     network(torch.randn(64, 1024, device="cuda")).sum().backward()
        >>> gpu.answer().verdict
        'fits'

    Args:
        device: The name of a profile.
        unbounded: Never raise torch.OutOfMemoryError.
        nonzero_fraction: The part of its places that a mask with unknown values selects.
    """

    def __init__(self, device: str = DEFAULT_DEVICE, *, unbounded: bool = False, nonzero_fraction: float = 1.0) -> None:
        self.profile = load_profile(device)
        self._cuda = CudaEmulation(self.profile, unbounded=unbounded, nonzero_fraction=nonzero_fraction)
        self._report: RunReport | None = None
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._cuda.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cuda.__exit__()
        self._report = report_of(
            self._cuda,
            (),
            ending="the block ended",
            failure=str(error) if error else None,
            ran_out_of_memory=kind is not None and kind.__name__ == "OutOfMemoryError",
            seconds=time.perf_counter() - self._start,
        )

    @property
    def report(self) -> RunReport:
        """Return the peaks by phase and step, the lines of code and the assumptions."""
        if self._report is None:
            raise UserError("expected a virtual GPU that was left, found one that is in use: end the with block first")
        return self._report

    def answer(self, risk: float = RISK, checkpoint: str = CHECKPOINT) -> Answer:
        """Return the bucket, the safe figure and the verdict, as `vramcast run` does."""
        simulation = self.report.simulation
        if simulation is None:
            raise UserError("expected training on the virtual GPU, found no network that ran on it: train one")
        question = Question.of_simulation("the block", simulation, self.profile)
        return Predictor.load(checkpoint).answers([question], risk)[0]
