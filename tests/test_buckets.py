"""GB buckets: where they begin and end, and what is left of a card above the last whole one."""

import numpy as np
import pytest

from vramcast.models.buckets import Buckets, choose_bucket
from vramcast.virtual_gpu.allocator.sizes import MIB

CARD = 40_410 * MIB


def test_the_published_classes_are_six_and_a_sliver_is_none_of_them():
    buckets = Buckets(8000 * MIB, CARD)
    assert buckets.classes == 6
    assert buckets.edges_bytes[-1] == 40_000 * MIB
    used = np.array([0, 7999, 8000, 39_999, 40_000, 40_409, 40_410, np.inf]) * MIB
    assert buckets.of(used).tolist() == [0, 0, 1, 4, 5, 5, 5, 5]


def test_more_than_a_sliver_is_a_class_of_its_own():
    buckets = Buckets(1000 * MIB, CARD)
    assert (buckets.fitting, buckets.edges_bytes[-1]) == (41, CARD)
    assert buckets.of(np.array([40_000, 40_409, 40_410]) * MIB).tolist() == [40, 40, 41]


@pytest.mark.parametrize("capacity_mib", [500, 7900, 8000])
def test_a_card_of_one_bucket_or_less_has_one_for_what_fits(capacity_mib):
    buckets = Buckets(8000 * MIB, capacity_mib * MIB)
    assert buckets.classes == 2
    assert buckets.of([1, capacity_mib * MIB - 1, capacity_mib * MIB, np.inf]).tolist() == [0, 0, 1, 1]


def test_every_class_holds_what_lies_between_its_edges():
    buckets = Buckets(3000 * MIB, CARD)
    lower, upper = buckets.edges_bytes[:-1], buckets.edges_bytes[1:]
    assert buckets.of(lower).tolist() == buckets.of(upper - 1).tolist() == list(range(buckets.fitting))
    assert buckets.of(upper[-1]) == buckets.fitting


def test_of_buckets_that_are_nearly_as_likely_the_highest_is_told():
    proba = np.array([[0.5, 0.4, 0.1], [0.6, 0.39, 0.01], [0.1, 0.8, 0.1], [0.3, 0.4, 0.3]])
    assert choose_bucket(proba).tolist() == [1, 0, 1, 2]
