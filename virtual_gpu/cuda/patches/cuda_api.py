"""torch.cuda: one device with the properties of the profile, and memory figures of the simulation (torch 2.13)."""

from collections import OrderedDict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.cuda.streams import Event, ExternalStream, Stream, StreamContext
from vramcast.virtual_gpu.replay.replay import EMPTY_CACHE

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
    from vramcast.virtual_gpu.cuda.several_devices import SeveralDevices

_VERSION = "12.8"
_CUDNN_VERSION = 91002
_POOLS = ("all", "small_pool", "large_pool")


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Replace the functions of torch.cuda, and of its modules that re-export them."""
    fakes = {**_device_functions(gpu), **_memory_functions(gpu), **_random_functions(), **_streams(gpu)}
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        patches.set_where_present(owner, fakes)
    patches.set(torch.cuda, "is_available", lambda: True)
    patches.set_where_present(
        torch.cuda, {"CUDAGraph": _NoGraph, "graph": _NoGraph, "make_graphed_callables": _NoGraph}
    )
    patches.set(torch.version, "cuda", _VERSION)
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    patches.set(torch.backends.cudnn, "is_available", lambda: True)
    patches.set(torch.backends.cudnn, "is_acceptable", lambda tensor: False)  # weights of RNNs stay as they are
    patches.set(torch.backends.cudnn, "version", lambda: _CUDNN_VERSION)
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
    patches.set(torch._C, "_cuda_getDeviceCount", lambda: gpu.device_count)
    patches.set(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    _legacy_types(patches, gpu)


class _NoGraph:
    """Stands for torch.cuda.CUDAGraph and torch.cuda.graph, which a virtual GPU cannot capture."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "expected a script without CUDA graphs, found torch.cuda.CUDAGraph: a virtual GPU cannot capture a graph; "
            "turn graphs off for this run"
        )


def _device_functions(gpu: "CudaEmulation") -> dict[str, Any]:
    profile = gpu.profile
    capability = divmod(round(profile.compute_capability * 10), 10)
    properties = SimpleNamespace(
        name=profile.title, major=capability[0], minor=capability[1], total_memory=profile.available_bytes,
        multi_processor_count=profile.multiprocessors, warp_size=32, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_block_optin=166912, shared_memory_per_multiprocessor=167936, is_integrated=False,
        is_multi_gpu_board=False, L2_cache_size=40 * MIB, uuid="GPU-00000000-0000-0000-0000-000000000000",
        pci_bus_id=0, pci_device_id=0, pci_domain_id=0, gcnArchName="",
    )  # fmt: skip

    def set_device(device: Any) -> None:
        gpu.check_ordinal(device)
        if gpu.several is not None:
            gpu.several.local.current = gpu.several.resolved(device).index

    def current() -> int:
        return gpu.device.index if gpu.several is None else gpu.several.local.current

    guard = _DeviceGuard if gpu.several is None else _guard_of(gpu.several)

    def is_modern() -> bool:
        return bool(gpu.capability >= 8.0)

    return {
        "is_initialized": lambda: True, "_is_compiled": lambda: True, "device_count": lambda: gpu.device_count,
        "current_device": current, "set_device": set_device, "_lazy_init": lambda: None,
        "init": lambda: None, "get_device_name": lambda device=None: profile.title,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "get_device_capability": lambda device=None: capability,
        "synchronize": lambda device=None: gpu.streams.synchronize(),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or is_modern(),
        "is_tf32_supported": is_modern, "ipc_collect": lambda: None, "device": guard,
        "device_of": guard, "_device": guard, "utilization": lambda device=None: 0,
        "can_device_access_peer": lambda device, peer: False, "_sleep": lambda cycles: None,
        "is_current_stream_capturing": lambda: False, "_exchange_device": lambda device: gpu.device.index,
        "_maybe_exchange_device": lambda device: gpu.device.index, "temperature": lambda device=None: 40,
        "cudart": lambda: SimpleNamespace(
            cudaMemGetInfo=lambda device: (gpu.memory.free_bytes, profile.available_bytes),
            cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0, cudaHostRegister=lambda *args: 0,
        ),
    }  # fmt: skip


class _DeviceGuard(nullcontext[None]):
    """Stands for `with torch.cuda.device(0)`: there is one device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.idx = self.prev_idx = 0


def _guard_of(several: "SeveralDevices") -> Any:
    """Return what stands for torch.cuda.device and torch.cuda.device_of."""

    class Guard:
        """Makes a device the current one."""

        def __init__(self, device: Any) -> None:
            is_tensor = isinstance(device, torch.Tensor)
            self._context = several.current((device.device if device.is_cuda else None) if is_tensor else device)

        def __enter__(self) -> None:
            self._context.__enter__()

        def __exit__(self, *error: Any) -> None:
            self._context.__exit__(*error)

    return Guard


def _memory_functions(gpu: "CudaEmulation") -> dict[str, Any]:
    allocator = gpu.memory.allocator

    def statistics(device: Any = None) -> OrderedDict[str, int]:
        figures: OrderedDict[str, int] = OrderedDict()
        for kind in ("allocated", "active", "requested", "reserved"):
            current, peak = (
                getattr(allocator, f"{prefix}{'allocated' if kind == 'active' else kind}_bytes")
                for prefix in ("", "peak_")
            )
            for pool in _POOLS:
                is_all = pool == "all"
                figures[f"{kind}_bytes.{pool}.current"] = current if is_all else 0
                figures[f"{kind}_bytes.{pool}.peak"] = peak if is_all else 0
        figures |= {"num_alloc_retries": allocator.retries, "num_ooms": len(gpu.memory.ooms)}
        figures |= {"num_device_alloc": allocator.cuda_mallocs, "inactive_split_bytes.all.current": 0}
        return figures

    def fraction(value: float, device: Any = None) -> None:
        allocator.set_memory_fraction(float(value))

    def summary(device: Any = None, abbreviated: bool = False) -> str:
        figures = statistics()
        lines = (f"{name:45} {value / MIB:12.1f} MiB" for name, value in figures.items() if ".all." in name)
        return "\n".join(("Memory of the virtual GPU (simulated)", *lines))

    return {
        "memory_allocated": lambda device=None: allocator.allocated_bytes,
        "max_memory_allocated": lambda device=None: allocator.peak_allocated_bytes,
        "memory_reserved": lambda device=None: allocator.reserved_bytes,
        "max_memory_reserved": lambda device=None: allocator.peak_reserved_bytes,
        "memory_cached": lambda device=None: allocator.reserved_bytes,
        "max_memory_cached": lambda device=None: allocator.peak_reserved_bytes,
        "reset_peak_memory_stats": lambda device=None: allocator.reset_peaks(),
        "reset_max_memory_allocated": lambda device=None: allocator.reset_peaks(),
        "reset_max_memory_cached": lambda device=None: allocator.reset_peaks(),
        "reset_accumulated_memory_stats": lambda device=None: None,
        "memory_stats": statistics, "memory_summary": summary,
        "memory_stats_as_nested_dict": lambda device=None: {},
        "mem_get_info": lambda device=None: (gpu.memory.free_bytes, gpu.profile.available_bytes),
        "device_memory_used": lambda device=None: gpu.memory.overhead_bytes + allocator.reserved_bytes,
        "empty_cache": lambda: gpu.memory.play(EMPTY_CACHE),
        "set_per_process_memory_fraction": fraction,
        "get_per_process_memory_fraction": lambda device=None: allocator.options.memory_fraction,
        "_record_memory_history": lambda *args, **kwargs: None,
        "memory_snapshot": lambda *args, **kwargs: gpu.segments(),
        "_snapshot": lambda *args, **kwargs: gpu.snapshot(),
        "_dump_snapshot": lambda filename="dump_snapshot.pickle", **kwargs: gpu.write_snapshot(filename),
        "get_allocator_backend": lambda: "native", "caching_allocator_warmup": lambda *args, **kwargs: None,
        "host_memory_stats": lambda device=None: OrderedDict(), "reset_peak_host_memory_stats": lambda: None,
    }  # fmt: skip


def _random_functions() -> dict[str, Any]:
    state = torch.zeros(16, dtype=torch.uint8)
    return {
        "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None, "seed": lambda: None,
        "seed_all": lambda: None, "initial_seed": lambda: 0, "get_rng_state": lambda device="cuda": state.clone(),
        "set_rng_state": lambda new_state, device="cuda": None, "get_rng_state_all": lambda: [state.clone()],
        "set_rng_state_all": lambda new_states: None,
    }  # fmt: skip


def _streams(gpu: "CudaEmulation") -> dict[str, Any]:
    streams = gpu.streams
    return {
        "Stream": Stream, "ExternalStream": ExternalStream, "Event": Event, "StreamContext": StreamContext,
        "stream": StreamContext, "current_stream": lambda device=None: streams.current,
        "default_stream": lambda device=None: streams.default, "set_stream": streams.set,
    }  # fmt: skip


def _legacy_types(patches: Patches, gpu: "CudaEmulation") -> None:
    """Support torch.cuda.FloatTensor(3) and isinstance(x, torch.cuda.FloatTensor)."""
    names = {"Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64,
             "Long": torch.int64, "Int": torch.int32, "Bool": torch.bool, "Byte": torch.uint8}  # fmt: skip
    for name, dtype in names.items():
        legacy = _legacy_type(gpu, f"{name}Tensor", dtype)
        patches.set_where_present(torch.cuda, {f"{name}Tensor": legacy})


def _legacy_type(gpu: "CudaEmulation", name: str, dtype: torch.dtype) -> Any:
    class Legacy(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if args and not isinstance(args[0], int):
                return torch.tensor(args[0], dtype=dtype, device=gpu.device)
            return torch.empty(args, dtype=dtype, device=gpu.device)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == dtype

    return Legacy(name, (), {"__module__": "torch.cuda", "_legacy_name": f"torch.cuda.{name}"})
