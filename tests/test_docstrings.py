"""The examples in docstrings of the classes that a reader of the estimators meets first."""

import doctest

import pytest

from vramcast.models import calibration, distribution, predictor


@pytest.mark.parametrize("module", [calibration, distribution, predictor], ids=lambda module: module.__name__)
def test_the_examples_of_a_module_are_true(module):
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 3
    assert results.failed == 0
