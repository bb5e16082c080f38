"""DistributedDataParallel compares shapes and broadcasts parameters in its constructor, which needs data.

Patches torch.nn.parallel.distributed._verify_param_shape_across_processes and _sync_module_states, checked with
torch 2.13. The gradients of a bucket are not reduced: a communication hook returns the bucket as it is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.parallel.distributed as ddp_module
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from vramcast.virtual_gpu.operators.autocast import replaced
from vramcast.virtual_gpu.tracing.trace import Tracer, Use


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


@contextmanager
def ddp_on_meta() -> Iterator[None]:
    """Let DistributedDataParallel wrap a network on the meta device."""
    with ExitStack() as stack:
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
            stack.enter_context(replaced(ddp_module, name, _nothing))
        yield


def keep_bucket(tracer: Tracer, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return the bucket unchanged: a communication hook that allocates nothing, as NCCL's all-reduce in place."""
    block = tracer.block_of(bucket.buffer())
    if block is not None:
        tracer.trace.uses[block] = Use.GRADIENTS
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
