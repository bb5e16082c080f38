"""TBEM's case study of depth: the networks, the table, and polynomials with known coefficients."""

from itertools import pairwise

import pytest

from benchmarks.study.depth_study import DEGREES, depth_study, vgg_spec
from vramcast.dataset_builder.backends import Backend, BackendResult
from vramcast.dataset_builder.configuration import make_backend
from vramcast.device.profiles import load_device
from vramcast.errors import UserError
from vramcast.jobs.filters import check
from vramcast.jobs.spec import StaticEstimate
from vramcast.virtual_gpu.measurement import Measurement, Status

MIB = 2**20


def layers_of(spec):
    return check(spec).counts


class Scripted(Backend):
    """A backend that returns a polynomial of the depth, and runs out of memory from some depth on."""

    name, origin, device = "scripted", "simulated", "none"

    def __init__(self, need, oom_from):
        self.need, self.oom_from = need, oom_from

    def measure(self, spec):
        counts = layers_of(spec)
        depth = counts["Conv2d"] + counts["Linear"]
        status = Status.OOM if depth >= self.oom_from else Status.OK
        return BackendResult(Measurement(status=status, device_used_bytes=self.need(depth)))


@pytest.fixture
def study(monkeypatch):
    """Runs the study on a scripted backend with a scripted static estimate."""

    def run(need, static, *arguments, oom_from=99, **more):
        def static_of(spec):
            counts = layers_of(spec)
            return StaticEstimate(static(counts["Conv2d"] + counts["Linear"]), 0, 0, 0)

        monkeypatch.setattr("benchmarks.study.depth_study.static_of", static_of)
        return depth_study(Scripted(need, oom_from), *arguments, **more)

    return run


@pytest.mark.parametrize(
    ("depth", "convolutions"),
    [(8, [1, 1, 1, 1, 1]), (11, [1, 1, 2, 2, 2]), (13, [2, 2, 2, 2, 2]), (16, [2, 2, 3, 3, 3])],
)
def test_depth_counts_layers_with_weights_and_grows_like_vgg(depth, convolutions):
    spec = vgg_spec(depth)
    assert [count for _, count in spec.network["stages"]] == convolutions
    assert {filters for filters, _ in spec.network["stages"]} == {64}
    assert layers_of(spec)["Conv2d"] + layers_of(spec)["Linear"] == depth


def test_a_depth_with_less_than_one_convolution_per_stage_is_refused():
    with pytest.raises(UserError, match="expected a depth from 8, a convolution a stage, found 7"):
        vgg_spec(7)


def test_polynomials_extrapolate_from_their_own_degree_on(study):
    static = lambda depth: 3 * depth**3 * MIB  # noqa: E731
    result = study(lambda depth: static(depth) + (100 + 7 * depth) * MIB, static, range(8, 28, 2), fitted_share=0.6)
    assert [point.depth for point in result.points if point.fitted] == [8, 10, 12, 14, 16, 18]
    assert [point.gap_bytes // MIB for point in result.points][:2] == [156, 170]
    errors = {(fit.target, fit.degree): fit.extrapolation_error for fit in result.fits}
    assert errors.keys() == {(target, degree) for target in ("gap", "gv") for degree in DEGREES}
    for degree in DEGREES:
        assert errors["gap", degree] < 1e-9
    assert errors["gv", 1] > errors["gv", 2] > 0.05
    assert errors["gv", 3] < 1e-9
    gap = next(fit for fit in result.fits if fit.target == "gap")
    assert gap.predicted_bytes == pytest.approx([point.measured_bytes for point in result.points])


def test_depths_that_do_not_fit_are_left_out_and_too_few_points_refused(study):
    need = lambda depth: depth * MIB  # noqa: E731
    result = study(need, need, range(8, 40), oom_from=20)
    assert [point.depth for point in result.points] == list(range(8, 20))
    with pytest.raises(UserError, match="expected more than 3 depths to fit and some to extrapolate to, found 4"):
        study(need, need, range(8, 40), oom_from=12)


def test_the_study_on_the_virtual_gpu():
    # The static estimate is linear over whole stages; the simulated one also steps down, where segments are freed.
    backend = make_backend({"backend": {"name": "virtual"}, "device": load_device("a100_40gb")})
    study = depth_study(backend, range(8, 44, 5), batch_size=4)
    points = study.points
    assert [point.depth for point in points] == [8, 13, 18, 23, 28, 33, 38, 43]
    assert points[-1].measured_bytes > 1.3 * points[0].measured_bytes
    assert len({after.static_bytes - before.static_bytes for before, after in pairwise(points)}) == 1
    assert all(0 < fit.fitted_error < 0.05 for fit in study.fits)
