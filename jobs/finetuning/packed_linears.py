"""Linear layers with the storage of GPTQ and AWQ, whose own kernels are compiled. They reproduce memory alone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.errors import UserError

_WORD_BITS = 32


class PackedLinear(nn.Linear):
    """A linear layer whose weight is packed into words of 32 bits, with a scale and a zero point for each group.

    A subclass of `nn.Linear`, because peft adds adapters to those.
    """

    def __init__(self, linear: nn.Linear, buffers: Mapping[str, Tensor], dequantizes: bool) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.dequantizes = dequantizes
        del self.weight
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    qweight: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The packed weight: peft reads the device of an adapter from it."""
        return self.qweight

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply in fp16, the dtype of both libraries' kernels."""
        output: Tensor = _PackedProduct.apply(inputs.half(), self)  # type: ignore[no-untyped-call]
        output = output.to(inputs.dtype)
        return output if self.bias is None else output + self.bias


class _PackedProduct(torch.autograd.Function):
    """The product with a packed weight, forward and backward."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, layer: PackedLinear) -> Tensor:
        """Multiply; a kernel that dequantises has a whole weight in fp16 meanwhile."""
        context.layer = layer
        if layer.dequantizes:
            context.save_for_backward(inputs)  # awq/modules/linear/gemm.py, WQLinearMMFunction
            return inputs @ _dequantized(layer)
        return inputs.new_empty(*inputs.shape[:-1], layer.out_features)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the inputs; the weight has none."""
        layer = context.layer
        if layer.dequantizes:
            weights = _dequantized(layer).t().unsqueeze(0).repeat(gradient.shape[0], 1, 1)
            return gradient.bmm(weights), None
        return gradient.new_empty(*gradient.shape[:-1], layer.in_features), None


def _dequantized(layer: PackedLinear) -> Tensor:
    return torch.empty(layer.in_features, layer.out_features, dtype=torch.float16, device=layer.weight.device)


def gptq_linear(linear: nn.Linear, arguments: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Make a layer with GPTQ's storage: weights packed along the inputs, fp16 scales, packed zeros, a group index.

    Its Triton kernel, which training uses, unpacks in registers: no dequantised weight is stored.
    """
    bits = int(arguments.get("bits", 4))
    if bits not in (2, 3, 4, 8):
        raise UserError(f"expected bits of gptq to be 2, 3, 4 or 8, found {bits}: change them")
    inputs, outputs = linear.in_features, linear.out_features
    groups = _groups(inputs, arguments)
    buffers = {
        "qweight": _words(inputs * bits // _WORD_BITS, outputs),
        "qzeros": _words(groups, outputs * bits // _WORD_BITS),
        "scales": torch.empty(groups, outputs, dtype=torch.float16, device="meta"),
        "g_idx": _words(inputs),
    }
    return PackedLinear(linear, buffers, dequantizes=False)


def awq_linear(linear: nn.Linear, arguments: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Make a layer with AWQ's storage: weights packed along the outputs, fp16 scales, packed zeros.

    AutoAWQ's GEMM dequantises the weight in both passes, and repeats it for each sample in the backward pass.
    """
    inputs, outputs = linear.in_features, linear.out_features
    groups = _groups(inputs, arguments)
    buffers = {
        "qweight": _words(inputs, outputs * 4 // _WORD_BITS),
        "qzeros": _words(groups, outputs * 4 // _WORD_BITS),
        "scales": torch.empty(groups, outputs, dtype=torch.float16, device="meta"),
    }
    return PackedLinear(linear, buffers, dequantizes=True)


def _words(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _groups(inputs: int, arguments: Mapping[str, Any]) -> int:
    """Return the number of groups that a row of weights has; -1 makes the row one group."""
    size = int(arguments.get("group_size", 128))
    if size != -1 and size < 1:
        raise UserError(f"expected group_size to be -1 or at least 1, found {size}: change it")
    return 1 if size == -1 else -(-inputs // size)
