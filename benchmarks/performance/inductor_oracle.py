"""Inductor for a CUDA device that is not there: it fuses and plans memory, and writes no kernel (torch 2.13 alone).

The oracle of the own plan. Its joint graphs move to CUDA after autograd; its scheduling is that of Triton with empty
kernels, which Inductor's extension point for other devices takes; its wrapper allocates tensors without data.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo import device_interface
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.codegen import common
from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch._inductor.codegen.wrapper import (
    EnterDeviceContextManagerLine,
    PythonWrapperCodegen,
    SubgraphPythonWrapperCodegen,
)
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import joint_graph as joint_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from vramcast.virtual_gpu.compiled.joint_graph import composite_gradients
from vramcast.virtual_gpu.compiled.rng import without_generator_states

CUDA = torch.device("cuda", 0)
_DEVICE = SimpleNamespace(
    name="NVIDIA A100", major=8, minor=0, multi_processor_count=108, total_memory=80 * 2**30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=166912, L2_cache_size=40 * 2**20, gcnArchName="",
    uuid="none",
)  # fmt: skip
_RUNTIME = ModuleType("vramcast_oracle_runtime")
"""The module that generated code imports: it allocates on meta, under the tracer."""
vars(_RUNTIME)["empty"] = lambda size, stride, dtype: torch.ops.aten.empty_strided.default(
    size, stride, dtype=dtype, device=torch.device("meta")
)


def oracle(session: Any, allocate: Any, module: fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
    """Compile a graph of Dynamo by Inductor: takes the place of `joint_graph.compile_graph`."""
    session.note_graph(module)
    with composite_gradients(), without_generator_states():
        compiled: Callable[..., Any] = compile_fx.compile_fx(module, inputs, inner_compile=_inner(session))
    return compiled


def _inner(session: Any) -> Callable[..., Any]:
    def compile_inner(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        tree_map(_move, list(inputs))
        _move_graph(module)
        with session.tracer.silent():  # the backward graph is compiled when it first runs
            return compile_fx.compile_fx_inner(module, inputs, **options)

    return compile_inner


def _move(item: Any) -> None:
    """Say that a fake tensor is on CUDA, in place, so that aliases stay aliases."""
    if isinstance(item, FakeTensor) and item.fake_device.type == "meta":
        item.fake_device = CUDA


def _move_graph(module: fx.GraphModule) -> None:
    def moved(item: Any) -> Any:
        return CUDA if isinstance(item, torch.device) and item.type == "meta" else item

    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            node.args = fx.node.map_aggregate(node.args, moved)
            node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
            tree_map(_move, node.meta.get("val"))


class _ToCuda(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        _move_graph(graph.owning_module)  # type: ignore[arg-type]

    def uuid(self) -> str:
        return "vramcast"


class _Block(EnterDeviceContextManagerLine):
    """A device guard that guards nothing."""

    def codegen(self, code: Any) -> None:
        code.writeline("if True:")
        code.do_indent()
        code.writeline("pass")


class _Kernel(TritonKernel):
    def codegen_kernel(self, name: Any = None) -> str:
        return ""

    def call_kernel(self, name: str, node: Any = None, deallocate_ws: bool = True) -> None:
        self.args.python_argdefs()
        for workspace in self.args.workspace_args:
            V.graph.wrapper_code.generate_workspace_allocation(workspace)
        if deallocate_ws:
            self.deallocate_workspaces()


class _Scheduling(TritonScheduling):
    kernel_type = _Kernel

    def define_kernel(self, *_: Any, **__: Any) -> str:
        return "kernel"

    def codegen_comment(self, *_: Any, **__: Any) -> None:
        pass


class _Allocations:
    """The parts of a wrapper that allocate and free; declaring and launching kernels does nothing."""

    def write_header(self: Any) -> None:
        super().write_header()  # type: ignore[misc]
        self.imports.writeline(f"import {_RUNTIME.__name__} as _rt")

    def write_triton_header_once(self) -> None:
        pass

    write_get_raw_stream_header = write_get_raw_stream_header_once = write_triton_header_once

    def write_get_raw_stream(self, *_: Any) -> str:
        return "0"

    def codegen_device_guard_enter(self: Any, device: int, *_: Any) -> None:
        self.writeline(_Block(device, self.last_seen_device_guard_index))
        self.last_seen_device_guard_index = device

    def generate_kernel_call(self, *_: Any, **__: Any) -> None:
        pass

    define_kernel = generate_kernel_call

    def make_allocation(
        self: Any, name: str, device: Any, dtype: Any, shape: Any, stride: Any, allocation_shape: Any = None,
        is_pinned: bool = False,
    ) -> str:  # fmt: skip
        if device.type == "cpu":
            made: str = super().make_allocation(  # type: ignore[misc]
                name, device, dtype, shape, stride, allocation_shape, is_pinned
            )
            return made
        size, whole, strides = (
            self.codegen_python_shape_tuple(tuple(item)) for item in (shape, allocation_shape or shape, stride)
        )
        view = "" if size == whole else f".as_strided({size}, {strides})"
        return f"{name} = _rt.empty({whole}, {strides}, {dtype}){view}"


class _Subgraph(_Allocations, SubgraphPythonWrapperCodegen):
    pass


class _Wrapper(_Allocations, PythonWrapperCodegen):
    supports_caching = False

    @staticmethod
    def create(is_subgraph: bool, name: Any, parent: Any, partition_signatures: Any = None) -> Any:
        return _Subgraph(name, parent, partition_signatures) if is_subgraph else _Wrapper()


class _OnHost(TorchDispatchMode):
    """Computes constants that Inductor folds, on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(item: Any) -> Any:
            return torch.device("cpu") if isinstance(item, torch.device) else item

        return func(*tree_map(moved, args), **tree_map(moved, kwargs or {}))


def _set_device_guard() -> None:
    """Give CUDA the device guard of meta, which does nothing (c10/core/impl/DeviceGuardImplInterface.cpp)."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    registry[1] = registry[1] or registry[14]


@contextmanager
def inductor_for_cuda() -> Iterator[None]:
    """Let Inductor compile for CUDA."""
    _set_device_guard()
    sys.modules[_RUNTIME.__name__] = _RUNTIME
    deduce = joint_passes.UniformValueConstantFolder._deduce_value

    def deduce_on_host(self: Any, node: Any) -> Any:
        with _OnHost():
            return deduce(self, node)

    def properties(*_: Any, **__: Any) -> Any:
        return _DEVICE

    def capability(*_: Any, **__: Any) -> tuple[int, int]:
        return _DEVICE.major, _DEVICE.minor

    common.init_backend_registration()
    before = common.device_codegens.get("cuda")
    values: dict[Any, dict[str, Any]] = {
        torch.cuda: {"get_device_properties": properties, "get_device_capability": capability, "current_device": int},
        device_interface.CudaInterface: {
            "get_device_properties": staticmethod(properties), "current_device": staticmethod(int),
            "is_available": staticmethod(lambda: True), "get_compute_capability": staticmethod(capability),
            "is_bf16_supported": staticmethod(lambda *_, **__: True),
        },
        device_interface.CudaInterface.Worker: {
            "get_device_properties": staticmethod(properties), "current_device": staticmethod(int),
        },
        scheduler: {"has_triton": lambda: True},
        joint_passes.UniformValueConstantFolder: {"_deduce_value": deduce_on_host},
    }  # fmt: skip
    settings = {
        "force_disable_caches": True, "compile_threads": 1, "shape_padding": False, "size_asserts": False,
        "joint_custom_pre_pass": _ToCuda(),
    }  # fmt: skip
    with ExitStack() as stack:
        for owner, items in values.items():
            for name, value in items.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        common.register_backend_for_device("cuda", _Scheduling, _Wrapper)
        stack.callback(common.device_codegens.__setitem__, "cuda", before)
        stack.enter_context(config.patch(settings))
        yield
