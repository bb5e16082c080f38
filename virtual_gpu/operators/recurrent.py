"""Recurrent layers: on CUDA one call of cuDNN, which saves the inputs of its backward pass in a reserve.

cuDNN does not document the size of the reserve (cudnnGetRNNTempSpaceSizes). The estimate here counts gates, cell and
output of every step, and is an approximation of the trace.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.tracing.trace import Kernel, Tracer

aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
_SAVED_PER_STEP = {0: 2, 1: 2, 2: 6, 3: 5}
"""Saved values by mode, in units of the hidden state: gates, output, a cell's state; GRU's reset state twice."""


def _run(
    mode: int, x: Tensor, states: Any, weights: Sequence[Tensor], has_biases: bool, layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """Run layers over a whole sequence as one call of cuDNN (native/cudnn/RNN.cpp, _cudnn_impl)."""
    hx, cx = states if mode == 2 else (states, None)
    if torch.is_autocast_enabled("cpu"):  # while a trace runs meta tensors follow this switch, see autocast.py
        x, hx, cx, *weights = _lowered(x, hx, cx, *weights)
    hidden = hx.shape[2] if cx is None else cx.shape[2]
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    a_layer = (4 if has_biases else 2) + bool(projected)
    out = aten._cudnn_rnn(
        x, list(weights), a_layer, None, hx, cx, mode, hidden, projected, layers, batch_first, dropout, train,
        bidirectional, [], None,
    )  # fmt: skip
    return out[:3] if mode == 2 else out[:2]


def _run_packed(
    mode: int, x: Tensor, batch_sizes: Tensor, states: Any, weights: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool,
) -> Any:  # fmt: skip
    """Run layers over packed sequences as one call of cuDNN (native/cudnn/RNN.cpp, _cudnn_impl)."""
    hx, cx = states if mode == 2 else (states, None)
    if torch.is_autocast_enabled("cpu"):
        x, hx, cx, *weights = _lowered(x, hx, cx, *weights)
    hidden = hx.shape[2] if cx is None else cx.shape[2]
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    a_layer = (4 if has_biases else 2) + bool(projected)
    out = aten._cudnn_rnn(
        x, list(weights), a_layer, None, hx, cx, mode, hidden, projected, layers, False, dropout, train,
        bidirectional, batch_sizes.tolist(), None,
    )  # fmt: skip
    return out[:3] if mode == 2 else out[:2]


def _lowered(*tensors: Tensor | None) -> list[Any]:
    """Cast all tensors: autocast runs the whole layer in lower precision (native/cudnn/AutocastRNN.cpp)."""
    dtype = torch.get_autocast_dtype("cpu")
    return [None if item is None else item.to(dtype) for item in tensors]


def _forward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate output, last states and reserve; the weights are already in one buffer (flatten_parameters)."""
    x, _, _, _, hx, cx, mode, hidden, projected, layers, _, _, train, bidirectional = args[:14]
    if not x.is_meta:
        return NotImplemented
    tracer.trace.approximations.add("the reserve of cuDNN's recurrent layers is estimated")
    directions = 2 if bidirectional else 1
    places = x.shape[:-1].numel()  # of all sequences; a packed input has them in one dimension
    output = tracer.see(x.new_empty((*x.shape[:-1], (projected or hidden) * directions)))
    hy = tracer.see(torch.empty_like(hx))
    cy = tracer.see(torch.empty_like(cx)) if cx is not None else x.new_empty(0)
    saved = layers * directions * places * hidden * _SAVED_PER_STEP[mode] if train else 0
    reserve = x.new_empty(saved * x.element_size(), dtype=torch.uint8)
    return output, hy, cy, tracer.see(reserve) if saved else reserve, x.new_empty(0)


def _backward(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate gradients of input and states, then of all weights in one buffer (RNN.cpp, _cudnn_rnn_backward)."""
    x, weights, _, _, hx, cx = args[:6]
    mask = args[-1]
    if not x.is_meta:
        return NotImplemented
    dx, dhx = (tracer.see(torch.empty_like(item)) for item in (x, hx))
    dcx = tracer.see(torch.empty_like(cx)) if cx is not None else None
    if not mask[3]:
        return dx, dhx, dcx, []
    buffer = tracer.see(x.new_empty(sum(item.numel() for item in weights)))
    parts = torch.split(buffer, [item.numel() for item in weights])
    return dx, dhx, dcx, [part.view(item.shape) for part, item in zip(parts, weights, strict=True)]


def recurrent_paths() -> dict[str, Callable[..., Any]]:
    """Return the composite operators that become one call."""
    whole = {f"{name}.input": partial(_run, mode) for name, mode in _MODES.items()}
    return {**whole, **{f"{name}.data": partial(_run_packed, mode) for name, mode in _MODES.items()}}


def recurrent_kernels() -> dict[Any, Kernel]:
    """Return the kernels of cuDNN's forward and backward pass."""
    return {aten._cudnn_rnn.default: _forward, aten._cudnn_rnn_backward.default: _backward}
