"""Distributions: every figure of an answer follows from one distribution."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramcast.models.answer import FITS, TIGHT, TOO_LARGE
from vramcast.models.buckets import Buckets, choose_bucket
from vramcast.models.calibration import with_tail
from vramcast.models.distribution import ErrorDistribution
from vramcast.virtual_gpu.allocator.sizes import MIB

CAPACITY = 40_000 * MIB
BUCKETS = Buckets(1024 * MIB, CAPACITY)


def distribution_of(estimate_mib, unit_mib, scores, floor_mib=500, capacities=(CAPACITY,)):
    count = len(capacities)
    estimate, unit, floor = (
        np.full(count, item * MIB, dtype=np.float64) for item in (estimate_mib, unit_mib, floor_mib)
    )
    return ErrorDistribution(
        overhead_bytes=floor,
        capacity_bytes=np.array(capacities, dtype=np.float64),
        out_of_distribution=np.zeros(count, dtype=np.bool_),
        estimate_bytes=estimate,
        unit_bytes=unit,
        scores=[with_tail(np.sort(np.array(scores, dtype=np.float64)))] * count,
    )


@settings(max_examples=300, deadline=None)
@given(
    st.floats(500, 60_000),
    st.floats(1, 5000),
    st.lists(st.floats(-3, 6), min_size=99, max_size=400),
    st.sampled_from([0.01, 0.05, 0.2]),
)
def test_all_figures_are_consistent(estimate_mib, unit_mib, scores, risk):
    distribution = distribution_of(estimate_mib, unit_mib, scores)
    proba = distribution.proba(BUCKETS)[0]
    point, safe = distribution.point_bytes()[0], distribution.on_device(1 - risk)[0]
    oom = distribution.proba(Buckets(CAPACITY, CAPACITY))[0, -1]
    assert proba.sum() == pytest.approx(1)
    assert proba.min() >= 0
    assert point <= safe
    assert (safe < CAPACITY) == (oom <= risk + 1e-12)
    assert (point < CAPACITY) == (oom <= 0.5 + 1e-12)
    verdict = TOO_LARGE if point >= CAPACITY else FITS if safe < CAPACITY else TIGHT
    assert verdict == (FITS if oom <= risk + 1e-12 else TIGHT if oom <= 0.5 + 1e-12 else TOO_LARGE)
    bucket = int(choose_bucket(proba[None])[0])
    if proba[bucket] > risk:
        assert BUCKETS.of(safe) >= bucket
    assert proba[: BUCKETS.of(point) + 1].sum() >= 0.5 - 1e-12
    assert proba[: BUCKETS.of(safe) + 1].sum() >= 1 - risk - 1e-12


def test_memory_beyond_a_job_s_own_device_does_not_fit():
    scores = np.linspace(-1, 1, 99)
    small, large = distribution_of(12_500, 1000, scores, capacities=(12_037.0 * MIB, CAPACITY)).proba(BUCKETS)
    assert small.sum() == large.sum() == pytest.approx(1)
    assert small[BUCKETS.of(12_037 * MIB) + 1 : -1].sum() == 0
    assert small[-1] == pytest.approx(1 - np.mean(12_500 + 1000 * scores < 12_037), abs=0.02)
    assert large[-1] == 0


RECORDED = Path(__file__).parent / "golden"
ANSWERS = [
    *(json.loads(line) for line in (RECORDED / "answers.jsonl").read_text().splitlines()),
    *(answer for spec in json.loads((RECORDED / "specs.json").read_text()).values() for answer in spec["answers"]),
]


@pytest.mark.parametrize("answer", [item for item in ANSWERS if item["status"] == "ok"])
def test_recorded_answers_do_not_contradict_themselves(answer):
    oom, risk, bucket = answer["oom_probability"], answer["risk"], answer["bucket"]
    expected = FITS if oom <= risk + 1e-9 else TIGHT if oom <= 0.5 + 1e-9 else TOO_LARGE
    assert answer["verdict"] == expected
    assert answer["estimate_mib"] <= answer["safe_mib"]
    assert bucket["probability"] <= 1
    assert bucket["probability"] <= risk or bucket["lower_mib"] <= answer["safe_mib"]


def test_the_rank_by_hand():
    """The 19th of 19 for a risk of 5 %: ceil(20 * 0.95) = 19; what is rarer lies at twice the largest score."""
    distribution = distribution_of(1000, 100, range(19))
    assert distribution.quantile_bytes(0.95)[0] == (1000 + 1800) * MIB
    assert distribution.quantile_bytes(0.5)[0] == (1000 + 900) * MIB
    assert distribution.quantile_bytes(0.99)[0] == (1000 + 3600) * MIB
    assert distribution.below(np.array([2801.0 * MIB]), [0])[0, 0] == 0.95


def test_nothing_is_below_the_overhead():
    distribution = distribution_of(600, 1000, [-5.0] * 50 + [1.0] * 50)
    assert distribution.quantile_bytes(0.1)[0] == 500 * MIB
    assert distribution.below(np.array([500.0 * MIB, 501.0 * MIB]), [0])[0].tolist() == [0, pytest.approx(50 / 101)]
