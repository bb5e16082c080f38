"""The examples in docstrings of the classes that a reader meets first."""

import doctest

import pytest

from vramcast.models import calibration, distribution, predictor
from vramcast.simulation import simulator
from vramcast.virtual_gpu.allocator import allocator
from vramcast.virtual_gpu.tracing import trace

MODULES = [allocator, calibration, distribution, predictor, simulator, trace]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_examples_of_a_module_are_true(module):
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 3
    assert results.failed == 0
