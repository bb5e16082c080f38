"""One rank of a script that runs on the virtual GPU: its collectives move no data, and its shards are traced.

The patches are those of a traced rank, without the device module: the script sees `torch.cuda` itself.
"""

from typing import TYPE_CHECKING, Any

from torch.testing._internal.distributed.fake_pg import FakeStore

from vramcast.virtual_gpu.distributed.dtensor_patch import untraced_shape_propagation
from vramcast.virtual_gpu.distributed.fsdp2_patch import fsdp2_on_meta
from vramcast.virtual_gpu.distributed.object_collectives import own_objects
from vramcast.virtual_gpu.distributed.pipeline_patch import static_pipeline
from vramcast.virtual_gpu.distributed.rank_tracer import distributed_result
from vramcast.virtual_gpu.distributed.script_groups import RankObserver

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

BACKEND = "cpu:fake,cuda:fake,meta:fake"


def join_fake_group(init: Any, rank: int, world_size: int, gpu: "CudaEmulation") -> None:
    """Initialise a process group that does not communicate, with the patches of a rank until the GPU is left."""
    init(BACKEND, rank=rank, world_size=world_size, store=FakeStore())
    gpu.tracer.distributed = distributed_result
    gpu.tracer.trace.world_size = world_size
    gpu.ranks = RankObserver(world_size)
    for patch in (untraced_shape_propagation, fsdp2_on_meta, static_pipeline, own_objects, gpu.ranks.observed):
        gpu.callbacks.enter_context(patch())
