"""Which ranks of a run differ in memory: equal ones are simulated once."""

from collections.abc import Sequence

from torch import nn

from vramcast.virtual_gpu.distributed.parallelism import Parallelism, RankGroup

_ALIKE = 0.001


def distinct_ranks(network: nn.Module, parallelism: Parallelism) -> tuple[RankGroup, ...]:
    """Return one rank of each kind.

    Stages of a pipeline differ. Shards of FSDP2 differ if the ranks do not divide the first dimension of parameters:
    the last rank has the least; up to 0.1 % of all elements count as alike. Partitions of ZeRO-1 differ by whole
    parameters: the largest and the smallest are returned. All other ranks are alike.
    """
    size, data = parallelism.world_size, parallelism.data
    if parallelism.pipeline > 1:
        return tuple(RankGroup(stage * data, data * parallelism.tensor) for stage in range(parallelism.pipeline))
    if parallelism.strategy in ("fsdp2", "hsdp"):
        shards = data // parallelism.replicas
        uneven = sum(item.numel() for item in network.parameters() if item.dim() and item.shape[0] % shards)
        if uneven > _ALIKE * sum(item.numel() for item in network.parameters()):
            return (RankGroup(0, size - 1), RankGroup(size - 1, 1))
    if parallelism.strategy == "zero1" and size > 1:
        return extremes(_partitions([item.numel() for item in network.parameters() if item.requires_grad], size))
    return (RankGroup(0, size),)


def _partitions(elements: Sequence[int], size: int) -> list[int]:
    """Distribute parameters as ZeroRedundancyOptimizer does: the largest first, each to the smallest partition."""
    totals = [0] * size
    for count in sorted(elements, reverse=True):
        totals[totals.index(min(totals))] += count
    return totals


def extremes(totals: Sequence[int]) -> tuple[RankGroup, ...]:
    """Return the ranks with the largest and the smallest partition."""
    chosen = dict.fromkeys((max(totals), min(totals)))
    return tuple(RankGroup(totals.index(total), totals.count(total)) for total in chosen)
