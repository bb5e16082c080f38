"""The evaluation loop: figures worked out by hand, and against scikit-learn."""

import re
from math import inf

import numpy as np
import pytest
from made_examples import CARD_BYTES, MIB, example_of, measured_mlps, mlp_table
from sklearn.metrics import f1_score

from vramcast.errors import UserError
from vramcast.models.baselines._formula import Formula
from vramcast.models.baselines.virtual import Virtual
from vramcast.models.buckets import Buckets
from vramcast.models.comparison import compare, text_table
from vramcast.models.metrics import macro_f1, wilson_interval

BUCKETS = Buckets(1000 * MIB, CARD_BYTES)


class Fixed(Formula):
    """Says of each example what it is told to."""

    name = "fixed"

    def __init__(self, mib_by_id):
        self.mib_by_id = mib_by_id

    def used_bytes(self, example):
        return self.mib_by_id[example.id] * MIB


def example(name, used_mib, fits=True, family="mlp"):
    return example_of(mlp_table(2, 2), used_bytes=used_mib * MIB, fits=fits, family=family, name=name)


EXAMPLES = [
    example("right", 1500),
    example("low", 2500),
    example("high", 1200, family="cnn"),
    example("alarm", 3000, family="cnn"),
    example("called", 39_000, fits=False),
    example("missed", 39_000, fits=False, family="cnn"),
]
FIXED = Fixed(
    {"right": 1800, "low": 1900, "high": 3400, "alarm": inf, "called": 41_000, "missed": 39_500, "made": 1000}
)


def test_the_figures_by_hand():
    found = compare({"fixed": FIXED}, EXAMPLES, BUCKETS)["fixed"].overall
    assert found.rows == 6
    assert found.accuracy == pytest.approx(2 / 6)  # right, called
    assert found.too_low == pytest.approx(2 / 6)  # low, missed
    assert found.safe_too_low is None
    # reserved is the upper edge of the predicted bucket, the card for the alarm
    assert found.over_reservation_mib == pytest.approx((500 + -500 + 2800 + 37_000) / 4)
    errors = [300 / 1500, 600 / 2500, 2200 / 1200, 1.0]
    assert found.mean_relative_error == pytest.approx(np.mean(errors))
    assert found.median_relative_error == pytest.approx(np.median(errors))
    assert found.p95_relative_error == pytest.approx(2200 / 1200)
    assert found.oom_recall == 0.5
    assert found.point_too_low == 0.25  # low, by 24 %
    assert found.oom_false_alarms == 0.25
    # true 1 2 1 3 40 40, predicted 1 1 3 40 40 39: F1 of 1 is 2 / 4, of 40 is 2 / 4, of 2, 3 and 39 nothing
    assert found.macro_f1 == pytest.approx((0.5 + 0.5) / 5)


def test_a_safe_bound_by_hand():
    safe = np.array([1900, 2600, 3500, inf, inf, 39_600]) * MIB
    found = compare({"fixed": FIXED}, EXAMPLES, BUCKETS, {"fixed": safe})["fixed"].overall
    assert found.safe_too_low == pytest.approx(1 / 6)  # missed
    assert found.too_low == pytest.approx(2 / 6)
    assert found.over_reservation_mib == pytest.approx((400 + 100 + 2300 + 37_000) / 4)


def test_families_stand_apart():
    report = compare({"fixed": FIXED}, EXAMPLES, BUCKETS)["fixed"]
    assert list(report.by_family) == ["cnn", "mlp"]
    assert report.by_family["mlp"].rows == 3
    assert report.by_family["mlp"].accuracy == pytest.approx(2 / 3)
    assert report.by_family["cnn"].accuracy == 0.0
    assert report.to_json()["by_family"]["cnn"]["oom_false_alarms"] == 0.5


def test_an_estimator_that_knows_is_perfect():
    examples = measured_mlps(40)
    found = compare({"virtual": Virtual()}, examples, BUCKETS)["virtual"].overall
    assert (found.accuracy, found.macro_f1, found.too_low, found.mean_relative_error) == (1.0, 1.0, 0.0, 0.0)
    assert found.oom_recall == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_macro_f1_is_that_of_scikit_learn(seed):
    random = np.random.default_rng(seed)
    true, predicted = random.integers(0, 5, 40), random.integers(1, 7, 40)
    assert macro_f1(true, predicted) == pytest.approx(f1_score(true, predicted, average="macro"))


def test_no_examples_have_no_figures():
    found = compare({"fixed": FIXED}, [], BUCKETS)["fixed"]
    assert found.overall.rows == 0
    assert {value for key, value in found.overall.to_json().items() if key not in ("rows", "intervals")} == {None}
    assert found.by_family == {}


def test_examples_without_a_measurement_are_refused():
    with pytest.raises(UserError, match="expected measured examples, found made"):
        compare({"fixed": FIXED}, [example_of(mlp_table(2, 2))], BUCKETS)


def test_the_text_table():
    reports = compare({"fixed": FIXED}, EXAMPLES, BUCKETS)
    head, *lines = text_table(reports, families_of=reports).splitlines()
    assert head.split()[:3] == ["estimator", "rows", "accuracy"]
    assert [line.split()[0] for line in lines] == ["fixed", "cnn", "mlp"]
    assert re.sub(r" \[.*?\]", "", lines[0]).split() == [
        "fixed", "6", "0.3333", "0.2000", "0.3333", "-", "9950", "-", "0.6200", "0.8183",
    ]  # fmt: skip
    assert "0.3333 [0.097, 0.700]" in lines[0]
    assert len(text_table(reports).splitlines()) == 2


@pytest.mark.parametrize(
    ("hits", "rows", "interval"), [(0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (50, 100, (0.4038, 0.5962))]
)
def test_the_interval_of_a_share_is_wilsons(hits, rows, interval):
    assert wilson_interval([True] * hits + [False] * (rows - hits)) == pytest.approx(interval, abs=1e-4)
