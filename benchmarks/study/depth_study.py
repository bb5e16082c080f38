"""TBEM's case study: the memory of a VGG against its depth, and how far polynomials extrapolate.

TBEM mutates VGG-16 so that only its depth changes, and draws GPU memory against it. Here the virtual GPU measures. A
polynomial is fitted to the shallower networks and extrapolated to the deeper ones: once for the measured memory (GV),
once for the difference to the static estimate (Gap).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vramcast.dataset_builder.backends import Backend
from vramcast.dataset_builder.backends.static import static_of
from vramcast.errors import UserError
from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

DEPTHS = tuple(range(8, 41))
DEGREES = (1, 2, 3)
_STAGES = 5
_OUTPUT_LAYERS = 3
"""VGG's linear layers, which count towards its depth: VGG-16 has 13 convolutions."""


@dataclass(frozen=True)
class DepthPoint:
    """One network of the study."""

    depth: int
    measured_bytes: int
    static_bytes: int
    fitted: bool
    """Whether the polynomials were fitted to it."""

    @property
    def gap_bytes(self) -> int:
        """The difference of measurement and static estimate."""
        return self.measured_bytes - self.static_bytes


@dataclass(frozen=True)
class DepthFit:
    """A polynomial of the depth, and its predictions for all points."""

    target: str
    """'gap', or 'gv' for the measured memory."""
    degree: int
    predicted_bytes: tuple[float, ...]
    """Predicted memory at each point; for 'gap', the static estimate is added."""
    fitted_error: float
    """Mean relative error on the fitted points."""
    extrapolation_error: float
    """Mean relative error on the other points."""


@dataclass(frozen=True)
class DepthStudy:
    """The table of the study."""

    points: tuple[DepthPoint, ...]
    fits: tuple[DepthFit, ...]


def vgg_spec(depth: int, batch_size: int = 32, filters: int = 64, input_size: int = 224) -> Spec:
    """Return a VGG of a depth, with convolutions of equal width spread evenly over five stages.

    The remainder goes to the last stages, as from VGG-13 to VGG-16.
    """
    convolutions = depth - _OUTPUT_LAYERS
    if convolutions < _STAGES:
        least = _STAGES + _OUTPUT_LAYERS
        raise UserError(f"expected a depth from {least}, a convolution a stage, found {depth}: raise it")
    each, more = divmod(convolutions, _STAGES)
    stages = [[filters, each + (index >= _STAGES - more)] for index in range(_STAGES)]
    network = {"template": "vgg", "stages": stages, "input_size": input_size, "num_classes": 1000}
    return make_spec("template", network, TrainingSetup(batch_size=batch_size))


def depth_study(
    backend: Backend, depths: Sequence[int] = DEPTHS, fitted_share: float = 0.6, batch_size: int = 32
) -> DepthStudy:
    """Measure VGGs of all depths, fit polynomials to the shallower share and extrapolate; OOM rows are left out."""
    measured = list(_measure(backend, depths, batch_size))
    seen = round(fitted_share * len(measured))
    if seen <= max(DEGREES) or seen == len(measured):
        raise UserError(
            f"expected more than {max(DEGREES)} depths to fit and some to extrapolate to, "
            f"found {len(measured)} that fit the device: give more depths or a smaller batch"
        )
    points = tuple(DepthPoint(*figures, fitted=index < seen) for index, figures in enumerate(measured))
    fits = tuple(_fit(points, target, degree) for target in ("gap", "gv") for degree in DEGREES)
    return DepthStudy(points, fits)


def _measure(backend: Backend, depths: Sequence[int], batch_size: int) -> Iterable[tuple[int, int, int]]:
    for depth in sorted(depths):
        spec = vgg_spec(depth, batch_size)
        measurement = backend.measure(spec).measurement
        if measurement.status is Status.OK and measurement.peak_bytes is not None:
            yield depth, measurement.peak_bytes, static_of(spec).total_bytes


def _fit(points: Sequence[DepthPoint], target: str, degree: int) -> DepthFit:
    depths = np.array([point.depth for point in points], dtype=np.float64)
    measured = np.array([point.measured_bytes for point in points], dtype=np.float64)
    static = np.array([point.static_bytes for point in points], dtype=np.float64)
    fitted = np.array([point.fitted for point in points])
    static_part = static if target == "gap" else np.zeros_like(static)
    polynomial = np.polynomial.Polynomial.fit(depths[fitted], (measured - static_part)[fitted], degree)
    predicted: NDArray[np.float64] = static_part + polynomial(depths)
    errors = np.abs(predicted - measured) / measured
    return DepthFit(
        target, degree, tuple(predicted.tolist()), float(errors[fitted].mean()), float(errors[~fitted].mean())
    )
