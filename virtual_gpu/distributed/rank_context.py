"""The environment of one traced rank: a fake process group, a device module and all patches of torch.distributed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vramcast.virtual_gpu.distributed.ddp_patch import ddp_on_meta
from vramcast.virtual_gpu.distributed.device_module import DeviceModule, device_module
from vramcast.virtual_gpu.distributed.dtensor_patch import untraced_shape_propagation
from vramcast.virtual_gpu.distributed.fsdp1_patch import fsdp1_on_meta
from vramcast.virtual_gpu.distributed.fsdp2_patch import fsdp2_on_meta
from vramcast.virtual_gpu.distributed.pipeline_patch import static_pipeline
from vramcast.virtual_gpu.distributed.process_group import fake_process_group
from vramcast.virtual_gpu.distributed.rank_tracer import RankTracer
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.storage_resizes import traced_resizes


@contextmanager
def rank_context(tracer: RankTracer, rank: int, world_size: int, compute_capability: float) -> Iterator[DeviceModule]:
    """Run a block as one rank of a distributed run on the meta device. One rank at a time per process."""
    with ExitStack() as stack:
        stack.enter_context(cuda_paths(compute_capability))
        stack.enter_context(traced_resizes(tracer))
        device = stack.enter_context(device_module(tracer))
        stack.enter_context(fake_process_group(rank, world_size))
        stack.enter_context(untraced_shape_propagation())
        stack.enter_context(fsdp2_on_meta())
        stack.enter_context(fsdp1_on_meta(tracer))
        stack.enter_context(ddp_on_meta())
        stack.enter_context(static_pipeline())
        yield device
