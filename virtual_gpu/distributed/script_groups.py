"""Which ranks of a running script differ, as one of them sees it: pipeline stages, partitions, uneven shards.

Observes _PipelineStageBase.__init__ of torch.distributed.pipelining and ZeroRedundancyOptimizer.__init__, checked with
torch 2.13.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from vramcast.virtual_gpu.distributed.distinct_ranks import extremes
from vramcast.virtual_gpu.distributed.parallelism import RankGroup
from vramcast.virtual_gpu.operators.autocast import replaced


class RankObserver:
    """Notes what makes the ranks of a script differ."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._stage_ranks: list[int] = []
        self._partitions: list[int] = []

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe stages and optimizers that are created within the block."""
        stages: Any = importlib.import_module("torch.distributed.pipelining.stage")
        make_stage = stages._PipelineStageBase.__init__

        def stage_init(stage: Any, *args: Any, **kwargs: Any) -> None:
            make_stage(stage, *args, **kwargs)
            self._stage_ranks = dist.get_process_group_ranks(stage.group)

        with ExitStack() as stack:
            stack.enter_context(replaced(stages._PipelineStageBase, "__init__", stage_init))
            if "torch.distributed.optim" in sys.modules:
                stack.enter_context(self._partitions_observed())
            yield

    @contextmanager
    def _partitions_observed(self) -> Iterator[None]:
        optimizers: Any = sys.modules["torch.distributed.optim"]
        make = optimizers.ZeroRedundancyOptimizer.__init__

        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._partitions = [
                sum(item.numel() for group in groups for item in group["params"])
                for groups in optimizer._partition_parameters()
            ]

        with replaced(optimizers.ZeroRedundancyOptimizer, "__init__", init):
            yield

    def groups(self, networks: Iterable[nn.Module]) -> tuple[RankGroup, ...]:
        """Return one rank of each kind that may differ.

        Without stages and partitions these are the first and the last: the last has the least of uneven shards, and the
        first often does more than the others.
        """
        size = self.world_size
        if len(self._stage_ranks) > 1:
            return tuple(RankGroup(rank, size // len(self._stage_ranks)) for rank in self._stage_ranks)
        if self._partitions:
            return extremes(self._partitions)
        if any(_has_uneven_shards(item) for item in networks):
            return RankGroup(0, size - 1), RankGroup(size - 1, 1)
        return RankGroup(0, 1), RankGroup(size - 1, size - 1)


def _has_uneven_shards(network: nn.Module) -> bool:
    return any(
        isinstance(placement, Shard) and parameter.shape[placement.dim] % parameter.device_mesh.size(dimension)
        for parameter in network.parameters()
        if isinstance(parameter, DTensor)
        for dimension, placement in enumerate(parameter.placements)
    )
