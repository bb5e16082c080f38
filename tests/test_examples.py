"""The examples in the docstrings of the classes that a reader meets first."""

import doctest

import pytest

from vramcast.simulation import simulator
from vramcast.virtual_gpu.allocator import allocator
from vramcast.virtual_gpu.tracing import trace

CLASSES = [(trace, "Tracer"), (allocator, "CachingAllocator"), (simulator, "Simulator")]


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_an_example_shows_what_happens(module, name):
    examples = doctest.DocTestFinder(recurse=False).find(getattr(module, name), name, globs=dict(vars(module)))
    result = doctest.DocTestRunner().run(examples[0])
    assert result.attempted > 3 and result.failed == 0
