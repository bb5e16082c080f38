"""Placement policies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramcast.collocation.placement import POLICIES, GpuState, place, rank, refusals
from vramcast.errors import UserError

GPUS = [GpuState("a", 12_000, 40_000, jobs=1), GpuState("b", 9_000, 40_000, jobs=2), GpuState("c", 30_000, 40_000)]


@pytest.mark.parametrize(
    ("policy", "chosen"), [("first-fit", "a"), ("best-fit", "b"), ("most-free", "c"), ("exclusive", "c")]
)
def test_a_policy_chooses(policy: str, chosen: str) -> None:
    result = place(8_000, GPUS, policy)
    assert result is not None
    assert result.gpu.id == chosen
    assert result.left_mib == result.gpu.free_mib - 8_000


def test_ties_go_to_the_first() -> None:
    twins = [GpuState("x", 10, 10), GpuState("y", 10, 10)]
    assert [place(5, twins, policy).gpu.id for policy in POLICIES] == ["x"] * len(POLICIES)  # type: ignore[union-attr]


def test_the_need_may_differ_by_device() -> None:
    gpus = [GpuState("small", 10_000, 16_000, "t4"), GpuState("large", 10_000, 80_000, "h100_80gb")]
    result = rank({"t4": 10_500, "h100_80gb": 9_900}, gpus)
    assert [item.gpu.id for item in result] == ["large"]
    with pytest.raises(UserError, match="on the device t4"):
        place({"h100_80gb": 1}, gpus)


def test_a_refusal_distinguishes_a_small_gpu_from_a_full_one() -> None:
    result = refusals(
        20_000, [GpuState("full", 1_000, 40_000), GpuState("small", 16_000, 16_000), GpuState("free", 40_000, 40_000)]
    )
    assert [(item.gpu.id, item.for_good) for item in result] == [("full", False), ("small", True)]
    assert "1000 are free" in result[0].reason


def test_an_exclusive_job_waits_for_an_idle_gpu() -> None:
    busy = [GpuState("a", 39_000, 40_000, jobs=1)]
    assert place(100, busy, "exclusive") is None
    assert not refusals(100, busy, "exclusive")[0].for_good


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UserError, match="the policy"):
        place(1, GPUS, "random")


GPU = st.builds(
    lambda name, free, more: GpuState(name, free, free + more), st.text(max_size=3), *[st.integers(0, 100)] * 2
)


@given(st.integers(0, 150), st.lists(GPU, max_size=8), st.sampled_from(POLICIES))
def test_place_is_the_head_of_rank_and_every_gpu_is_placed_or_refused(
    need: int, gpus: list[GpuState], policy: str
) -> None:
    ranked = rank(need, gpus, policy)
    assert place(need, gpus, policy) == (ranked[0] if ranked else None)
    assert len(ranked) + len(refusals(need, gpus, policy)) == len(gpus)
    assert all(item.left_mib >= 0 for item in ranked)
