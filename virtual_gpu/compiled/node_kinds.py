"""The kinds of nodes in a partitioned graph: which call a library, which are views, and which a compiler fuses.

The lists follow torch/_inductor/lowering.py: operators there are lowered to loops, others fall back to a kernel.
"""

import operator
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


class NodeKind(Enum):
    """How a node of a graph takes memory."""

    INPUT = auto()
    CONSTANT = auto()
    OUTPUT = auto()
    SIZE = auto()
    """A number: a size or a symbol."""
    ITEM = auto()
    """One of several outputs of another node."""
    VIEW = auto()
    LIBRARY = auto()
    """A kernel of a library, whose inputs and outputs exist."""
    OPAQUE = auto()
    """A kernel that only CUDA has, such as flex_attention: its outputs exist, and nothing is run."""
    WRITE = auto()
    """A write into an input, fused with what it reads."""
    REDUCTION = auto()
    """A fused loop whose result exists."""
    FUSED = auto()
    """A fused loop, whose result exists only if something else than a loop reads it."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PACKETS = _words("""
    mm bmm addmm baddbmm _scaled_mm _grouped_mm _scaled_grouped_mm _int_mm convolution convolution_backward
    embedding_dense_backward _embedding_bag sort topk index_put _unsafe_index_put scatter scatter_add scatter_reduce
    nonzero unique _fft_r2c _fft_c2c _fft_c2r _cdist_forward _cdist_backward _pdist_forward grid_sampler_2d_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d
    avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _thnn_fused_lstm_cell _cudnn_rnn
""")
LIBRARY = {getattr(aten, name) for name in _PACKETS if hasattr(aten, name)}
REDUCTIONS = _words("""
    sum mean amax amin max min var_mean var std prod any all argmax argmin cumsum cumprod logcumsumexp _softmax
    _log_softmax native_layer_norm native_group_norm prepare_softmax_online
""")
_VIEWS = (
    "view", "permute", "expand", "unsqueeze", "squeeze", "t", "transpose", "slice", "select", "alias", "as_strided",
    "reshape", "_unsafe_view", "split", "split_with_sizes", "unbind", "detach", "diagonal", "view_as_complex",
    "view_as_real", "unfold", "_reshape_alias", "lift_fresh",
)  # fmt: skip


def kinds_of(graph: fx.Graph) -> dict[fx.Node, NodeKind]:
    """Return the kind of each node."""
    return {node: _kind(node) for node in graph.nodes}


def _kind(node: fx.Node) -> NodeKind:
    fixed = {"placeholder": NodeKind.INPUT, "get_attr": NodeKind.CONSTANT, "output": NodeKind.OUTPUT}
    if node.op in fixed:
        return fixed[node.op]
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return NodeKind.SIZE
    if node.target is operator.getitem:
        return NodeKind.ITEM
    if not isinstance(node.target, torch._ops.OpOverload):
        return NodeKind.OPAQUE if isinstance(node.target, torch._ops.HigherOrderOperator) else NodeKind.LIBRARY
    if node.target is aten.copy_.default and _is_input(node.args[0]):
        return NodeKind.WRITE
    return _kind_of_operator(node, value)


def _kind_of_operator(node: fx.Node, value: Any) -> NodeKind:
    target: Any = node.target
    name = target._schema.name.partition("::")[2]
    if not isinstance(value, Tensor | tuple | list) or _on_host(value):
        return NodeKind.LIBRARY
    if target.namespace in ("aten", "prims") and (name in _VIEWS or _is_alias(node, value)):
        return NodeKind.VIEW
    if target is aten.scatter.value and getattr(node.args[0], "target", None) is aten.full.default:
        return (
            NodeKind.FUSED
        )  # a comparison of places (torch/_inductor/fx_passes/post_grad.py, scatter_upon_const_tensor)
    if target.overloadpacket in LIBRARY or target.namespace not in ("aten", "prims") or _is_complex(node, value):
        return NodeKind.LIBRARY
    return NodeKind.REDUCTION if isinstance(value, tuple | list) or name in REDUCTIONS else NodeKind.FUSED


def _compares_places(node: fx.Node) -> bool:
    """Return whether a number is scattered into equal ones (fx_passes/post_grad.py, scatter_upon_const_tensor)."""
    return node.target is aten.scatter.value and getattr(node.args[0], "target", None) is aten.full.default


def _on_host(value: Any) -> bool:
    """Return whether the host computes a value."""
    return any(item.device.type == "cpu" for item in tensors_of(value))


def _is_input(item: Any) -> bool:
    return isinstance(item, fx.Node) and item.op == "placeholder"


def _is_alias(node: fx.Node, value: Any) -> bool:
    """Return whether a result shares the memory of an operand."""
    if not isinstance(value, Tensor):
        return False
    storage = value.untyped_storage()._cdata
    operands = (item.meta.get("val") for item in node.all_input_nodes)
    return any(isinstance(item, Tensor) and item.untyped_storage()._cdata == storage for item in operands)


def _is_complex(node: fx.Node, value: Any) -> bool:
    """Return whether complex numbers are involved, for which Inductor generates no loops (lowering.py)."""
    operands = (item.meta.get("val") for item in node.all_input_nodes)
    return any(item.is_complex() for item in tensors_of([value, *operands]))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a node's value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from tensors_of(item)
