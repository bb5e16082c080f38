"""The own plan of compiled code agrees with Inductor, which runs without a GPU on one release of torch."""

import pytest

from benchmarks.performance.compile_agreement import peaks
from benchmarks.performance.compile_networks import CASES
from vramcast.virtual_gpu.compiled.releases import release

pytestmark = pytest.mark.skipif(release() != "2.13", reason="Inductor runs without a GPU on torch 2.13 alone")


@pytest.mark.parametrize("name", ["convolutions", "ResNet"])
def test_the_own_plan_agrees_with_inductor(name: str) -> None:
    """`python -m benchmarks.performance.compile_agreement` compares all networks."""
    eager, own, theirs = peaks(CASES[name], compiled=False), peaks(CASES[name]), peaks(CASES[name], by_inductor=True)
    assert own.active_bytes == pytest.approx(theirs.active_bytes, rel=0.005)
    assert own.reserved_bytes == pytest.approx(theirs.reserved_bytes, rel=0.02)
    assert own.active_bytes <= eager.active_bytes
