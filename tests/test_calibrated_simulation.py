"""The simulation with calibrated errors: the contract, strata, disturbed rows, and bounds."""

from dataclasses import replace

import numpy as np
import pytest
from estimator_contract import SavedEstimatorContract
from synthetic_examples import cnn_spec, example_of, mlp_examples, mlp_spec

from vramcast.models.calibration import LEAST_ROWS, CalibratedErrors, pinned, with_tail
from vramcast.models.distribution import score_quantile
from vramcast.models.disturbances import disturbed
from vramcast.models.estimators.calibrated_simulation import CalibratedSimulation, calibrated_errors
from vramcast.models.example import Label
from vramcast.models.features.full import simulated_need_bytes
from vramcast.models.uncertainty import calibrated_strata, strata, unit_bytes
from vramcast.virtual_gpu.allocator.sizes import MIB

GIB = 1024 * MIB


class TestCalibratedSimulation(SavedEstimatorContract):
    @staticmethod
    def make():
        return CalibratedSimulation()


@pytest.fixture(scope="module")
def fitted():
    return CalibratedSimulation().fit(mlp_examples(400), mlp_examples(60, seed=1))


def needs(examples):
    return np.array([simulated_need_bytes(item) for item in examples], dtype=np.float64)


@pytest.mark.parametrize("risk", [0.02, 0.1])
def test_bounds_are_too_low_no_more_often_than_asked(fitted, risk):
    test = mlp_examples(700, seed=4)
    needed = np.array([item.label.used_bytes if item.label.fits else np.inf for item in test])
    assert np.mean(fitted.safe_bytes(test, risk) < needed) < risk + 0.03  # the coverage of one draw varies
    assert np.all(fitted.safe_bytes(test, risk) >= fitted.predict_bytes(test))
    assert np.all(fitted.safe_bytes(test, 0.02) >= fitted.safe_bytes(test, 0.2))


def test_a_small_stratum_is_replaced_by_a_wider_one(fitted):
    known = mlp_examples(1)[0]
    own, wider = strata(known)[0], strata(known)[-2]
    elsewhere = strata(replace(known, source="another device"))
    assert fitted.errors_.stratum_of(strata(known), 0.01) == own
    assert wider in elsewhere
    assert fitted.errors_.stratum_of(elsewhere, 0.01).startswith("generated")
    scores = {own: np.zeros(LEAST_ROWS - 1), wider: np.zeros(LEAST_ROWS)}
    assert CalibratedErrors(scores).stratum_of(strata(known), 0.01) == wider
    assert CalibratedErrors(scores).stratum_of(strata(known), 0.001) == wider  # the largest there is


def test_a_job_far_from_the_calibration_jobs_is_widened_by_its_distance(fitted):
    near, far = mlp_examples(1, seed=9), [example_of(mlp_spec(width=30_000, depth=1))]
    ratios = fitted.out_of_distribution_.ratios(fitted.encoder_.matrix([*near, *far]))
    assert ratios[0] < 1 < ratios[1]
    distribution = fitted.distribution([*near, *far])
    units = [unit_bytes(job, fitted.errors_.stratum_of(strata(job), 0.01), 0.0) for job in (*near, *far)]
    assert distribution.unit_bytes[0] == units[0]
    assert distribution.unit_bytes[1] == pytest.approx(units[1] * (1 + 0.5 * np.log(ratios[1])))


def test_strata_follow_what_is_uncertain():
    mlp, cnn = (replace(example_of(spec), calibrated=True) for spec in (mlp_spec(), cnn_spec(depth=5)))
    assert strata(mlp)[-2:] == ("generated, exact", "all")
    assert strata(cnn)[-2:] == ("generated, workspaces", "all")
    assert "generated, exact, assumed values" in strata(replace(mlp, assumed=True))
    assert "generated, exact, uncalibrated device" in strata(replace(mlp, calibrated=False))
    assert "real, exact" in strata(replace(mlp, family="hf"))
    real = replace(cnn, family="timm")
    assert unit_bytes(replace(mlp, assumed=True), "all", 0.0) > unit_bytes(mlp, "all", 0.0)
    assert unit_bytes(replace(real, calibrated=False), "all", 0.0) > unit_bytes(real, "all", 0.0)
    assert unit_bytes(real, "all", 0.0) > unit_bytes(replace(real, layers=()), "all", 0.0)
    assert unit_bytes(mlp, strata(mlp)[0], 0.0) == 512 * MIB


@pytest.mark.parametrize(("layers", "power"), [(True, 0.4), (False, 0.5)])
def test_the_unit_of_a_real_network_grows_more_slowly_with_its_memory_if_workspaces_are_guessed(layers, power):
    real = replace(example_of(cnn_spec(depth=5)), calibrated=True, family="timm")
    real = real if layers else replace(real, layers=())
    more = replace(real, simulated=replace(real.simulation, reserved_bytes=3 * real.simulation.reserved_bytes))
    memory = [item.simulation.reserved_bytes + 128 * MIB for item in (real, more)]
    ratio = unit_bytes(more, "all", 0.0) / unit_bytes(real, "all", 0.0)
    assert ratio == pytest.approx((memory[1] / memory[0]) ** power)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([-3, -1, 0.5, 1, 4], [-3, -1, 0, 1, 4]),
        ([-30, -2, -1, 2, 40], [-30, -2, 0, 2, 40]),
        ([1, 2, 3, 4, 50], [0, 0, 0, 4, 50]),
        ([-2, 0, 7], [-2, 0, 7]),
        ([0, 1, 4, 4, 4], [0, 1, 4, 4, 4]),  # most jobs take more than simulated
    ],
)
def test_the_estimate_is_the_median_and_bounds_stay(scores, expected):
    assert pinned(np.array(scores, dtype=np.float64)).tolist() == expected


def test_the_unit_of_a_generated_network_with_convolutions_is_learned():
    cnn = replace(example_of(cnn_spec(depth=5)), calibrated=True)
    reserved = cnn.simulation.reserved_bytes
    assert unit_bytes(cnn, "all", 0.3) - unit_bytes(cnn, "all", 0.1) == pytest.approx(0.2 * reserved)
    elsewhere = replace(cnn, calibrated=False)  # where nothing was learned
    assert unit_bytes(elsewhere, "all", 0.3) == unit_bytes(elsewhere, "all", 0.1)
    assert strata(elsewhere)[-3:-1] == strata(replace(cnn, family="timm"))[-3:-1], "the scores of such units"


def trying(tried_gib, beyond_gib=4):
    """Return an example in which cuDNN tries so many GiB, the largest trial with so many beyond the job's memory."""
    example = replace(example_of(cnn_spec(depth=5, cudnn_benchmark=True)), family="timm", calibrated=True)
    reserved = example.simulation.reserved_bytes
    trials = {"tried_bytes": int(tried_gib * GIB), "trial_bytes": int(reserved + beyond_gib * GIB)}
    return replace(example, simulated=replace(example.simulation, **trials))


def test_a_job_with_trials_has_strata_of_its_own():
    few, some, many = (trying(gib) for gib in (3, 20, 90))
    assert not any("trials" in name for name in strata(few))
    assert {"real, workspaces", "all"} <= set(calibrated_strata(few, disturbed=False))
    for example, name in ((some, "some trials"), (many, "many trials")):
        assert strata(example)[:2] == (f"{example.source}/timm/{name}", name)
        assert calibrated_strata(example, disturbed=False) == strata(example)[:2]
        assert calibrated_strata(example, disturbed=True) == strata(example)[:1]


def test_the_unit_of_a_job_with_trials_is_the_memory_of_the_largest():
    small, large = (unit_bytes(trying(90, beyond), "many trials", 0.0) for beyond in (4, 9))
    assert large - small == pytest.approx(5 * GIB)
    assert unit_bytes(trying(90, 4), "all", 0.0) == unit_bytes(trying(90, 9), "all", 0.0)


def test_a_constant_that_recurs_is_another_process_and_does_not_widen_other_devices():
    rows = mlp_examples(300)
    estimated = needs(rows)
    plain = [measured_at(item, need) for item, need in zip(rows, estimated, strict=True)]
    held = [measured_at(item, need + 1042 * MIB) for item, need in zip(rows[:9], estimated[:9], strict=True)]
    assert not disturbed(plain, estimated).any()
    found = disturbed([*held, *plain[9:]], estimated)
    assert found[:9].all()
    assert not found[9:].any()
    assert not disturbed([*held[:2], *plain[2:]], estimated).any()  # two may be chance
    errors = calibrated_errors([*held, *plain[9:]], estimated, np.zeros(len(rows)))
    margins = []
    for job in (plain[20], replace(plain[20], source="another device", capacity_bytes=2**40)):
        name = errors.stratum_of(strata(job), 0.01)
        margins.append(unit_bytes(job, name, 0.0) * score_quantile(with_tail(errors.scores[name]), 0.99))
    assert margins[0] > 500 * MIB
    assert margins[1] < MIB


def measured_at(example, own_bytes):
    used = int(example.overhead_bytes + own_bytes)
    return replace(example, label=Label(used, fits=True), capacity_bytes=2**40)


def test_a_band_has_no_error_inside_it():
    row = mlp_examples(1)[0]
    need = needs([row])
    used = int(row.overhead_bytes + need[0]) + 300 * MIB
    band = replace(row, label=Label(used, fits=True, least_used_bytes=used - 400 * MIB), capacity_bytes=2**40)
    assert calibrated_errors([band], need, np.zeros(1)).scores["all"] == pytest.approx([0])
    needed = np.concatenate([need, need, need - 200 * MIB])
    assert calibrated_errors([band] * 3, needed, np.zeros(3)).scores["all"][-1] > 0
