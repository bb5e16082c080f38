"""FSDP2 refuses to train parameters on the meta device: here the meta device stands for the GPU.

Patches FSDPParamGroup._validate_no_meta_params, checked with torch 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from vramcast.virtual_gpu.operators.autocast import replaced


@contextmanager
def fsdp2_on_meta() -> Iterator[None]:
    """Let FSDP2 train parameters on the meta device."""
    with replaced(FSDPParamGroup, "_validate_no_meta_params", lambda self: None):
        yield
