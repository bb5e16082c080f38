"""Ensembles: the contract, averages, safe answers, and jobs out of distribution."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from estimator_contract import NARROW, SavedEstimatorContract
from synthetic_examples import cnn_spec, example_of, mlp_examples, mlp_spec

from vramcast.errors import UserError
from vramcast.models.estimators.classifiers import NetworkSettings
from vramcast.models.estimators.ensemble import Ensemble, best_temperature, rounds_of
from vramcast.models.estimators.fitting import PlainFitter
from vramcast.models.estimators.labels import intervals
from vramcast.models.estimators.network_uncertainty import (
    calibrated_strata,
    in_units,
    relative_scales,
    score,
    stratum,
    unit_bytes,
    with_everything,
)
from vramcast.models.example import Example, Label
from vramcast.models.layer_columns import is_convolution
from vramcast.models.out_of_distribution import OutOfDistribution
from vramcast.virtual_gpu.allocator.sizes import MIB

SETTINGS = NetworkSettings(bucket_mib=50, width=16, blocks=1)
TRAINED = 460
QUICK = PlainFitter(epochs=8, batch_size=32, learning_rate=5e-3)


class TestEnsemble(SavedEstimatorContract):
    @staticmethod
    def make():
        return Ensemble.of(SETTINGS, 2, QUICK)


@pytest.fixture(scope="module")
def ensemble():
    return Ensemble.of(SETTINGS, 5, QUICK).fit(mlp_examples(TRAINED - 60), mlp_examples(60, seed=1))


def test_members_differ_and_their_average_is_the_answer(ensemble):
    test = mlp_examples(20, seed=3)
    found = [member.predict_proba(test, NARROW) for member in ensemble.members]
    assert not np.array_equal(found[0], found[1])
    plain = uncalibrated(ensemble)
    test = [item for item, outside in zip(test, flags(ensemble, test), strict=True) if not outside]
    found = [member.predict_proba(test, NARROW) for member in ensemble.members]
    np.testing.assert_allclose(plain.predict_proba(test, NARROW), np.mean(found, axis=0), atol=1e-9)


def flags(ensemble, examples):
    return ensemble.distribution(examples).out_of_distribution


def uncalibrated(ensemble):
    found = Ensemble(ensemble.members)
    found.out_of_distribution_, found.temperature_ = ensemble.out_of_distribution_, 1.0
    found.reference_errors_ = ensemble.reference_errors_
    return found


@pytest.mark.parametrize("risk", [0.02, 0.1])
def test_safe_answers_are_too_low_no_more_often_than_asked(ensemble, risk):
    test = mlp_examples(700, seed=4)
    safe = ensemble.safe_bytes(test, risk)
    needed = np.array([item.label.used_bytes if item.label.fits else np.inf for item in test])
    assert np.mean(safe < needed) < risk + 0.03  # some 230 calibration rows: the coverage of one draw varies
    assert np.all(safe >= ensemble.predict_bytes(test))
    assert np.all(NARROW.of(ensemble.safe_bytes(test, risk)) >= NARROW.of(ensemble.predict_bytes(test)))


def test_less_risk_is_more_memory(ensemble):
    test = mlp_examples(50, seed=5)
    assert np.all(ensemble.safe_bytes(test, 0.02) >= ensemble.safe_bytes(test, 0.2))


def test_the_width_is_the_one_under_which_new_rows_are_likeliest(ensemble):
    rows = mlp_examples(300, seed=2)
    plain = ensemble.members[0].distribution(rows)
    found = best_temperature(plain, rows)
    for off in (0.6, 1.6):
        assert best_temperature(plain.tempered(off), rows) == pytest.approx(found / off, rel=0.06)
        assert likelihood(plain.tempered(found), rows) > likelihood(plain.tempered(found * off), rows)
    assert 0.7 < ensemble.temperature_ / found < 1.4  # set on other rows, by all members


def likelihood(distribution, rows):
    """Of all but the oddest rows."""
    return np.sort(distribution.log_likelihood(*intervals(rows)))[len(rows) // 50 :].mean()


def test_an_odd_row_does_not_set_the_width(ensemble):
    rows = mlp_examples(300, seed=2)
    odd = type(rows[0])(**{**vars(rows[0]), "label": Label(990 * 2**20, fits=True)})
    plain = uncalibrated(ensemble).distribution(rows)
    assert best_temperature(plain, [odd, *rows[1:]]) == pytest.approx(best_temperature(plain, rows), rel=0.06)


def test_members_leave_out_parts_of_their_own_and_part_no_group():
    groups = [f"{index // 2}" for index in range(120)]
    rounds = rounds_of(groups, 5, seed=1)
    everything = set(range(len(groups)))
    calibrated_on = []
    for parts in rounds:
        places = [set(item.tolist()) for item in (parts.train, parts.validation, parts.calibration)]
        assert set.union(*places) == everything
        assert [len(item) / len(groups) for item in places] == [0.7, 0.1, 0.2]
        names = [{groups[place] for place in item} for item in places]
        assert all(a.isdisjoint(b) for a, b in combinations(names, 2))
        calibrated_on.append(places[2])
    assert all(a.isdisjoint(b) for a, b in combinations(calibrated_on, 2))
    assert set.union(*calibrated_on) == everything


def test_sisters_of_a_design_are_not_parted_when_members_calibrate(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "vramcast.models.estimators.ensemble.rounds_of",
        lambda groups, *rest: seen.append(groups) or rounds_of(groups, *rest),
    )
    examples = [replace(item, design=f"library/{index % 12}") for index, item in enumerate(mlp_examples(60))]
    Ensemble.of(SETTINGS, 1, QUICK).fit(examples[:50], examples[50:])
    assert seen == [[item.design for item in examples]]


def test_every_member_beyond_five_leaves_out_less():
    rounds = rounds_of([str(index) for index in range(200)], 10, seed=0)
    assert [len(parts.train) for parts in rounds] == [170] * 10
    assert sum(len(parts.calibration) for parts in rounds) == 200


def test_what_members_start_from_is_calibrated_on_all_rows(ensemble):
    assert len(ensemble.reference_errors_.scores["mlp"]) == TRAINED


def test_jobs_out_of_distribution_are_flagged_and_others_are_not(ensemble):
    assert flags(ensemble, mlp_examples(200, seed=6)).mean() < 0.03
    strange = [
        example_of(cnn_spec()),
        example_of(mlp_spec(width=30_000, depth=1)),
        example_of(mlp_spec(optimizer="SGD")),
        example_of(mlp_spec(autocast="bf16")),
    ]
    assert flags(ensemble, strange).all()


def test_a_job_out_of_distribution_is_answered_by_the_simulation_with_the_errors_of_simulations(ensemble):
    strange = [example_of(mlp_spec(optimizer="SGD"))]
    assert flags(ensemble, strange).all()
    usual = math.exp(ensemble.members[0].center_) * strange[0].simulation.reserved_bytes
    assert ensemble.predict_bytes(strange) == pytest.approx([strange[0].overhead_bytes + usual])
    scores = ensemble.reference_errors_.scores["mlp"]
    margin = scores[math.ceil((len(scores) + 1) * 0.8) - 1]
    raised = (usual + 512 * MIB) * math.exp(margin) - 512 * MIB
    assert ensemble.safe_bytes(strange, 0.2) == pytest.approx([strange[0].overhead_bytes + raised])
    low, high = (
        ensemble.distribution(strange).quantile_bytes(level) - strange[0].overhead_bytes for level in (0.25, 0.75)
    )
    scale = np.diff(np.quantile(scores, [0.25, 0.75]))[0] / (2 * math.log(3))  # quartiles of a logistic
    relative = math.log(((usual + 512 * MIB) * math.exp(scale) - 512 * MIB) / usual)
    assert np.log(high / low) == pytest.approx(2 * math.log(3) * relative)
    assert relative_scales(ensemble.reference_errors_, strange, np.array([usual])) == pytest.approx([relative])


def test_a_tiny_job_out_of_distribution_does_not_fill_the_device(ensemble):
    example = example_of(mlp_spec(width=8, depth=1, batch=1, optimizer="SGD"))
    strange = [replace(example, simulated=replace(example.simulation, reserved_bytes=2**16))]
    assert flags(ensemble, strange).all()
    assert ensemble.predict_proba(strange, NARROW)[0, -1] < 0.01


def test_a_trial_of_cudnn_calibrates_only_jobs_that_try():
    example = example_of(cnn_spec(depth=5))
    plain = Example(**{**vars(example), "family": "timm"})
    trying = Example(**{**vars(plain), "training": cnn_spec(cudnn_benchmark=True).training})
    assert stratum(plain) == "real with workspaces"
    assert calibrated_strata(trying) == ("real with trials", "real with workspaces", "real elsewhere")
    tried = Example(**{**vars(trying), "label": Label(1, fits=True, trial=True)})
    assert calibrated_strata(tried) == ("real with trials",)
    assert stratum(replace(trying, layers=trying.layers[:3])) == "real"
    assert calibrated_strata(example) == ("cnn",)


def test_all_real_networks_speak_for_a_library_that_nobody_measured():
    example = example_of(cnn_spec(depth=5))
    attention = Example(**{**vars(example), "family": "timm", "layers": example.layers[:3]})
    assert stratum(replace(attention, family="hf")) == "real elsewhere"
    assert calibrated_strata(attention) == ("real", "real elsewhere")
    assert stratum(replace(example, family="hf")) == "real with workspaces"


def test_conv1d_of_transformers_is_no_convolution():
    assert [kind for kind in ("Conv2d", "Conv1d", "StdConv2dSame", "Conv1D", "Linear") if is_convolution(kind)] == [
        "Conv2d", "Conv1d", "StdConv2dSame",
    ]  # fmt: skip


def test_calibration_survives_saving(ensemble, tmp_path):
    ensemble.save(tmp_path)
    again, test = Ensemble.load(tmp_path), mlp_examples(30, seed=7)
    np.testing.assert_array_equal(again.safe_bytes(test, 0.1), ensemble.safe_bytes(test, 0.1))
    np.testing.assert_array_equal(flags(again, test), flags(ensemble, test))
    assert again.temperature_ == ensemble.temperature_
    assert again.members[0].encoder_ is again.members[1].encoder_


def test_an_ensemble_has_members():
    with pytest.raises(UserError, match="expected one member"):
        Ensemble([])


def test_distances_are_to_the_nearest_training_examples():
    random = np.random.default_rng(0)
    train = random.normal(size=(1000, 8))
    detector = OutOfDistribution.fit(train, random.normal(size=(400, 8)), seed=0)
    assert detector.reference.shape == (256, 8)
    assert (detector.ratios(random.normal(size=(500, 8))) > 1).mean() < 0.03
    assert (detector.ratios(10 + random.normal(size=(50, 8))) > 1).all()
    assert detector.distances(np.zeros((1, 8)))[0] < detector.distances(np.full((1, 8), 3.0))[0]


def test_a_rank_is_out_of_distribution(ensemble):
    known = mlp_examples(1, seed=6)[0]
    assert flags(ensemble, [known, replace(known, unknown_nccl=True)]).tolist() == [False, True]


def test_a_risk_that_the_rows_do_not_support_gets_a_sentence(ensemble):
    with pytest.raises(UserError, match=r"calibration rows or more for a risk of 0\.0001"):
        ensemble.safe_bytes(mlp_examples(1), 0.0001)


def test_the_same_excess_weighs_less_the_larger_a_job_but_a_small_one_does_not_set_the_margin():
    small, large = np.array([20.0 * MIB]), np.array([20_000.0 * MIB])
    assert score(small + 100 * MIB, small) > score(large + 100 * MIB, large)
    assert score(6 * small, small) < score(1.25 * large, large)  # 100 MiB of a small job, 5,000 of a large one


def test_a_need_exceeds_its_estimate_by_its_score_in_units():
    estimated = np.array([10.0, 300.0, 20_000.0]) * MIB
    needed = np.array([60.0, 290.0, 24_000.0]) * MIB
    np.testing.assert_allclose(estimated + unit_bytes(estimated) * in_units(score(needed, estimated)), needed)
    assert score([100.0], [np.inf])[0] == -np.inf
    assert (np.inf + unit_bytes(np.array([np.inf])) * in_units(np.array([0.0])))[0] == np.inf


def test_less_than_a_segment_is_as_uncertain_as_a_segment():
    errors = with_everything({"mlp": 0.02 * math.log(3) * np.linspace(-2, 2, 201)})  # quartiles of a scale of 0.02
    jobs = mlp_examples(3)
    tiny, small, large = relative_scales(errors, jobs, np.array([1.0, 2.0**20, 50_000.0 * MIB]))
    assert 0.02 < tiny == small < 0.5
    assert large == pytest.approx(0.02, rel=0.02)
    elsewhere = [replace(job, family="hf") for job in jobs]  # a stratum without rows
    assert relative_scales(errors, elsewhere, np.full(3, 50_000.0 * MIB)) == pytest.approx(large)
