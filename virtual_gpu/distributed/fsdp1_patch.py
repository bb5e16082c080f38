"""FullyShardedDataParallel would materialise parameters on the meta device and skip record_stream outside CUDA.

Patches _need_to_materialize_module and _init_device_handle in torch.distributed.fsdp._init_utils, and
_no_dispatch_record_stream in the modules that import it, checked with torch 2.13.
"""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.distributed.rank_tracer import RankTracer
from vramcast.virtual_gpu.operators.autocast import replaced

_MODULES = ("_common_utils", "_flat_param", "_runtime_utils")


@contextmanager
def fsdp1_on_meta(tracer: RankTracer) -> Iterator[None]:
    """Let FullyShardedDataParallel train parameters on the meta device and trace its record_stream."""

    def record_stream(tensor: Tensor, stream: Any) -> None:
        tracer.record_stream(tensor, stream.number)

    def use_device_module(state: Any, *_: Any) -> Any:
        state._device_handle = common._FSDPDeviceHandle.from_device(torch.device("meta"))
        return state

    package = "torch.distributed.fsdp."
    init = importlib.import_module(f"{package}_init_utils")
    common = importlib.import_module(f"{package}_common_utils")
    fsdp = importlib.import_module(f"{package}fully_sharded_data_parallel")
    with ExitStack() as stack:
        stack.enter_context(replaced(fsdp, "_init_device_handle", use_device_module))
        stack.enter_context(replaced(init, "_need_to_materialize_module", lambda *_: (False, False)))
        for name in _MODULES:
            module = importlib.import_module(package + name)
            stack.enter_context(replaced(module, "_no_dispatch_record_stream", record_stream))
        yield
