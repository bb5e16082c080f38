"""From a graph of Dynamo to functions that allocate as its compiled code does: AOTAutograd and the min-cut partitioner.

Both are torch's own. They trace on meta tensors: on a build without CUDA, autograd refuses fake tensors on CUDA.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from vramcast.errors import UntraceableError
from vramcast.virtual_gpu.compiled.own_plan import Allocate, MemoryPlan
from vramcast.virtual_gpu.compiled.rng import without_generator_states

if TYPE_CHECKING:
    from vramcast.virtual_gpu.compiled.session import CompileSession

aten = torch.ops.aten
_SHAPE_ONLY = ("_like", "new_", "size", "shape", "dim", "numel", "stride", "dtype", "device", "type_as", "expand_as")
"""Parts of the names of operators and methods that read the shape of a tensor alone."""


class CompilerBackend(partial[Callable[..., Any]]):
    """A backend of torch.compile that copies as itself: Lightning copies the arguments of every torch.compile."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompilerBackend":
        return self


def compile_graph(
    session: "CompileSession", allocate: Allocate, module: fx.GraphModule, inputs: Sequence[Any], **_: Any
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: the backend of torch.compile."""
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415 - takes seconds to import

    importlib.import_module("torch._inductor.lowering")  # decompositions of pooling ask for it
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    needed = _needed_inputs(module)
    plan = partial(_planned, session, allocate)
    backend: Any = aot_autograd(
        fw_compiler=plan,
        bw_compiler=plan,
        inference_compiler=plan,
        partition_fn=partial(_partition, needed),
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with composite_gradients(), without_generator_states():
        compiled: Callable[..., Any] = backend(module, inputs)
    session.note_graph(module)  # here: torch may start again with other inputs
    return compiled


def _planned(
    session: "CompileSession", allocate: Allocate, module: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Return the function that runs the plan of a graph; it takes its arguments as a list and clears it."""
    plan = MemoryPlan(module)
    session.record.kernels.update(dict.fromkeys(plan.kernels()))
    run: Any = partial(plan.run, allocate)
    run._boxed_call = True
    return run  # type: ignore[no-any-return]


def _partition(needed: set[int], joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Partition a joint graph as Inductor does, and check that no input got lost on the way."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: PLC0415

    _check_inputs(joint, needed)
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def _needed_inputs(module: fx.GraphModule) -> set[int]:
    """Return the places of the inputs whose values Dynamo's graph reads."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    return {place for place, node in enumerate(nodes) if any(not _reads_shape_alone(user) for user in node.users)}


def _reads_shape_alone(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(part in name for part in _SHAPE_ONLY) or node.target is getattr


def _check_inputs(joint: fx.GraphModule, needed: set[int]) -> None:
    """Raise if a trainable or other floating input is read by Dynamo's graph but not by the joint graph.

    A rule for a kernel that allocates its output without computing it would cut off all that comes before it.
    """
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder" and "tangents" not in str(node.target)]
    lost = [
        node.name
        for place, node in enumerate(inputs)
        if place in needed and not node.users and _is_floating(node.meta.get("val"))
    ]
    if lost:
        raise UntraceableError(
            f"expected a compiled graph that uses all its inputs, found {', '.join(lost)} unused: an operator "
            "allocates its result without computing it; run this network without torch.compile"
        )


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1


@cache
def _composites_with_meta_kernels() -> tuple[Any, ...]:
    """Return composite operators that also have a Python kernel on meta, which would be taken as a whole."""
    meta: Any = torch._C.DispatchKey.Meta
    hidden = []
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(aten, packet, None), overload or "default", None) if "aten::" in name else None
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if operator is not None and is_composite and meta in operator.py_kernels:
            hidden.append(operator)
    return tuple(hidden)


@contextmanager
def composite_gradients() -> Iterator[None]:
    """Let autograd see through composite operators on meta tensors."""
    meta: Any = torch._C.DispatchKey.Meta
    removed = [(item, item.py_kernels.pop(meta)) for item in _composites_with_meta_kernels() if meta in item.py_kernels]
    for item, _ in removed:
        item._dispatch_cache.clear()
    try:
        yield
    finally:
        for item, kernel in removed:
            item.py_kernels[meta] = kernel
            item._dispatch_cache.clear()
