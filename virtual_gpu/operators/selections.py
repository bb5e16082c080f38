"""Gradients of selections, which torch writes into zeros in place: of `max(dim)`, `sort`, `gather`, `index_select` ...

Under a dispatch mode torch calls the operator that allocates a result beside the zeros, for the sake of subclasses of
tensors (torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike). On a GPU without modes it does not.
"""

from typing import Any

import torch

from vramcast.virtual_gpu.tracing.trace import Kernel, Tracer

aten = torch.ops.aten

_SELECTING = ("Max", "Min", "Topk", "Sort", "Mode", "Kthvalue", "Median", "Nanmedian")
_NODES = {
    aten.scatter.src: _SELECTING,  # value_selecting_reduction_backward
    aten.scatter_add.default: ("Gather", "Cummax", "Cummin"),  # gather_backward, cummaxmin_backward
    aten.index_add.default: ("IndexSelect",),  # index_select_backward
    aten.put.default: ("Take",),  # take_backward
}
"""The nodes of autograd that write into zeros of their own, by operator."""


def _in_place(operator: Any) -> Kernel:
    names = {f"{node}Backward" for node in _NODES[operator]}

    def write(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the zeros that a node of torch itself has filled; a user's code gets a result of its own."""
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled() or not args[0].is_meta:
            return NotImplemented
        return args[0] if _kind(node) in names else NotImplemented

    return write


def _kind(node: Any) -> str:
    """Return the name of a node of torch without the number of its overload; a user's Function has none."""
    is_users = isinstance(node, torch.autograd.function.BackwardCFunction)
    return "" if is_users else node.name().rpartition("::")[2].rstrip("0123456789")


def selection_kernels() -> dict[Any, Kernel]:
    """Return the kernels of operators that write into a tensor at indices."""
    return {operator: _in_place(operator) for operator in _NODES}
