"""Strategies that run torch's own code on a traced rank: each wraps a network, some also the optimizer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vramcast.virtual_gpu.distributed.ddp_patch import keep_bucket
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.distributed.rank_tracer import RankTracer
from vramcast.virtual_gpu.distributed.tensor_plan import apply_tensor_plan
from vramcast.virtual_gpu.distributed.wrap_policy import wrapped_modules
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.training.step import DTYPES

MESH_TYPE = "meta"
MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]


def parallelize(network: nn.Module, parallelism: Parallelism, setup: TrainingSetup, tracer: RankTracer) -> nn.Module:
    """Return the network as a rank trains it. Runs within `rank_context`."""
    strategy = parallelism.strategy
    if strategy in ("ddp", "zero1"):
        return _data_parallel(network, tracer)
    if strategy == "fsdp1":
        return _flat_sharded(network, parallelism, setup)
    if strategy == "tp":
        apply_tensor_plan(network, init_device_mesh(MESH_TYPE, (parallelism.world_size,)))
        return network
    return _fully_sharded(network, parallelism, setup)


def _data_parallel(network: nn.Module, tracer: RankTracer) -> nn.Module:
    wrapped = DistributedDataParallel(network)
    wrapped.register_comm_hook(tracer, keep_bucket)
    return wrapped


def _mesh(parallelism: Parallelism) -> DeviceMesh:
    """Return the mesh of a sharded strategy: stages, replicas, shards and tensor-parallel ranks, outermost first."""
    sizes = {
        "pipeline": parallelism.pipeline,
        "replicate": parallelism.replicas,
        "shard": parallelism.data // parallelism.replicas,
        "tensor": parallelism.tensor,
    }
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
    return init_device_mesh(MESH_TYPE, tuple(sizes[name] for name in names), mesh_dim_names=names)


def pipeline_group(parallelism: Parallelism) -> dist.ProcessGroup:
    """Return the process group of the stages that a rank belongs to."""
    mesh = _mesh(parallelism)
    return mesh.get_group("pipeline")


def _fully_sharded(network: nn.Module, parallelism: Parallelism, setup: TrainingSetup) -> nn.Module:
    """Apply fully_shard to each block and to the root, as torchtitan does."""
    mesh = _mesh(parallelism)
    blocks = wrapped_modules(network, parallelism.wrap_names)
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        apply_tensor_plan(network, mesh["tensor"])
    data = tuple(name for name in names if name in ("replicate", "shard"))
    after = parallelism.shard_after_forward
    shard = partial(
        fully_shard,
        mesh=mesh[data] if len(data) > 1 else mesh[data[0]],
        # torch's default is true for blocks; the root stays whole, and since torch 2.7 an explicit true shards it, too
        **({} if after is True else {"reshard_after_forward": after}),
        mp_policy=_policy(parallelism, setup),
        offload_policy=CPUOffloadPolicy(pin_memory=False) if parallelism.offload else OffloadPolicy(),
    )
    for block in blocks:
        shard(block)
    shard(network)
    return network


def _policy(parallelism: Parallelism, setup: TrainingSetup) -> MixedPrecisionPolicy:
    reduce = parallelism.reduce_dtype or ("fp32" if setup.autocast else None)
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[setup.autocast] if setup.autocast else None,
        reduce_dtype=DTYPES[reduce] if reduce else None,
    )


def _flat_sharded(network: nn.Module, parallelism: Parallelism, setup: TrainingSetup) -> nn.Module:
    """Wrap each block and the root in FullyShardedDataParallel with the options of accelerate."""
    blocks = {id(block) for block in wrapped_modules(network, parallelism.wrap_names)}

    def is_block(module: nn.Module, recurse: bool, **_: Any) -> bool:
        return recurse or id(module) in blocks

    return FullyShardedDataParallel(
        network,
        auto_wrap_policy=is_block,
        mixed_precision=_mixed_precision(parallelism, setup),
        cpu_offload=CPUOffload(offload_params=True) if parallelism.offload else None,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        sharding_strategy=_sharding(parallelism),
        limit_all_gathers=True,
        use_orig_params=True,
    )


def _sharding(parallelism: Parallelism) -> ShardingStrategy:
    return ShardingStrategy.FULL_SHARD if parallelism.shard_after_forward else ShardingStrategy.SHARD_GRAD_OP


def _mixed_precision(parallelism: Parallelism, setup: TrainingSetup) -> MixedPrecision | None:
    if setup.autocast is None:
        return None
    dtype = DTYPES[setup.autocast]
    reduce = DTYPES[parallelism.reduce_dtype] if parallelism.reduce_dtype else dtype
    return MixedPrecision(param_dtype=dtype, reduce_dtype=reduce, buffer_dtype=dtype)


def parallel_optimizer(make: MakeOptimizer, parameters: Sequence[nn.Parameter], parallelism: Parallelism) -> Any:
    """Return the optimizer of a rank: for zero1 its shard, whose steps update and broadcast a part."""
    if parallelism.strategy == "tp":  # foreach operators do not mix DTensors with others
        groups = [[item for item in parameters if isinstance(item, DTensor) is kind] for kind in (True, False)]
        return make([{"params": group} for group in groups if group])
    if parallelism.strategy != "zero1":
        return make(list(parameters))

    class Sharded(torch.optim.Optimizer):
        """Stands for the class of the local optimizer: ZeroRedundancyOptimizer calls it with its part."""

        def __new__(cls, params: Any, **_: Any) -> Any:
            return make(params)

    return ZeroRedundancyOptimizer(list(parameters), optimizer_class=Sharded)
