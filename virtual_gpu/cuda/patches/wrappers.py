"""DataParallel and process groups of one rank: recognised, reported, never silent (torch 2.13)."""

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.cuda.several_devices import apply_communication

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_PARALLEL = "DataParallel runs on one device: its replicas on other devices are not simulated"
_DISTRIBUTED = "DistributedDataParallel of one rank: buckets are simulated, communication is not"

_NCCL = (2, 27, 5)
"""A release of NCCL, for code that asks: none runs."""


class _AbsentNccl:
    """NCCL's process group, of which there is no instance: torch asks whether a backend is one."""


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Replace the wrappers around a network."""
    _data_parallel(patches, gpu)
    if torch.distributed.is_available():
        _process_group(patches, gpu)


def _data_parallel(patches: Patches, gpu: "CudaEmulation") -> None:
    if gpu.several is not None:
        apply_communication(patches)
        return

    def forward(self: nn.DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        gpu.assumptions.note_once(_PARALLEL)
        return self.module(*args, **kwargs)

    patches.set(nn.DataParallel, "forward", forward)


def _process_group(patches: Patches, gpu: "CudaEmulation") -> None:
    """Stand in for NCCL with a group that does not communicate."""
    distributed: Any = torch.distributed
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    parallel: Any = importlib.import_module("torch.nn.parallel.distributed")
    real_init, real_wrap = c10d.init_process_group, parallel.DistributedDataParallel.__init__

    def init(backend: Any = None, *args: Any, world_size: int = -1, rank: int = -1, **kwargs: Any) -> None:
        ranks = int(os.environ.get("WORLD_SIZE", "1")) if world_size < 1 else world_size
        if ranks != 1:
            own = int(os.environ.get("RANK", "0")) if rank < 0 else rank
            live: Any = importlib.import_module("vramcast.virtual_gpu.distributed.script_rank")
            live.join_fake_group(real_init, own, ranks, gpu)
            return
        fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
        real_init("fake", rank=0, world_size=1, store=fake.FakeStore())

    def wrap(self: Any, *args: Any, **kwargs: Any) -> None:
        if distributed.get_world_size() == 1:
            gpu.assumptions.note_once(_DISTRIBUTED)
        real_wrap(self, *args, **kwargs)
        self.register_comm_hook(None, lambda state, bucket: _unchanged(bucket))  # DDP checks annotations

    for owner in (distributed, c10d):
        patches.set(owner, "init_process_group", init)
        patches.set(owner, "is_nccl_available", lambda: True)
        patches.set(owner, "get_backend", lambda group=None: "nccl")
    if not hasattr(c10d, "ProcessGroupNCCL"):  # a build without NCCL, which now says that it has it
        patches.set(c10d, "ProcessGroupNCCL", _AbsentNccl)
    patches.set_where_present(importlib.import_module("torch.distributed.device_mesh"), {"init_process_group": init})
    patches.set(importlib.import_module("torch.cuda.nccl"), "version", lambda: _NCCL)
    patches.set(parallel.DistributedDataParallel, "__init__", wrap)
    patches.set_where_present(parallel, {"_verify_param_shape_across_processes": lambda *args, **kwargs: None})
    gpu.callbacks.callback(_leave_group, distributed)


def _unchanged(bucket: Any) -> Any:
    """Return the gradients of a bucket as they are: one rank has none to add."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _leave_group(distributed: Any) -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
