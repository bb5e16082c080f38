"""Quantised weights of linear layers on the meta device.

bitsandbytes and torchao run themselves: their operators have fake kernels. GPTQ and AWQ have compiled kernels alone, so
`packed_linears` has layers of our own with their storage.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from vramcast.errors import UserError
from vramcast.jobs.finetuning.packed_linears import awq_linear, gptq_linear
from vramcast.virtual_gpu.training.step import DTYPES

Make = Callable[[nn.Linear, Mapping[str, Any], torch.dtype], nn.Module]


def quantize_linears(module: nn.Module, name: str, arguments: Mapping[str, Any], compute_dtype: str) -> tuple[str, ...]:
    """Replace the linear layers of a network, except its output layer, and return notes about the others."""
    make, dtype = _MAKERS[name], DTYPES[compute_dtype]
    output = _output_layer(module)
    count = 0
    for parent, child, linear in list(_linears(module)):
        if linear is not output:
            setattr(parent, child, make(linear, arguments, dtype))
            count += 1
    if not count:
        raise UserError(
            f"expected linear layers to quantise in {type(module).__name__}, found none: leave out --quantize"
        )
    return tuple(_rest(module))


def _linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name, child


def _output_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that libraries do not quantise: the output embedding, else the last linear layer."""
    get: Any = getattr(module, "get_output_embeddings", None)
    output: nn.Module | None = get() if callable(get) else None
    return output or next((linear for _, _, linear in reversed(list(_linears(module)))), None)


def _rest(module: nn.Module) -> Iterator[str]:
    """Yield a note if large weights are not in linear layers, as the experts of some mixtures are not."""
    whole = [item for item in module.parameters() if item.is_floating_point() and item.dim() > 2]
    size = sum(item.numel() for item in whole)
    if size > 2**26:
        yield f"{size / 1e9:.1f} billion parameters are not in linear layers (such as fused experts): not quantised"


def _library(name: str, quantity: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"expected the library {name}, which makes {quantity} weights, to be installed, found: {error}; "
            "pip install 'vramcast[finetuning]', or name an interpreter that has it by --python"
        ) from error


def _four_bits(kind: str, double: bool) -> Make:
    """Return what makes a `Linear4bit` of bitsandbytes.

    Two codes are in a byte, and an fp32 scale (absmax) is for 64 weights. With double quantisation, a scale has 8 bits,
    256 scales have an fp32 scale of their own, and all have an offset.
    """

    def make(linear: nn.Linear, arguments: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
        bnb, functional = _library("bitsandbytes", kind), import_module("bitsandbytes.functional")
        block = arguments.get("blocksize", 64)
        packed, state = functional.quantize_4bit(
            linear.weight.detach(), blocksize=block, compress_statistics=double, quant_type=kind
        )
        layer = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, compress_statistics=double,
            quant_type=kind, device="meta",
        )  # fmt: skip
        layer.weight = bnb.nn.Params4bit(
            packed, requires_grad=False, quant_state=state, blocksize=block, compress_statistics=double,
            quant_type=kind, bnb_quantized=True, module=layer,
        )  # fmt: skip
        layer.quant_state = state
        _keep(layer, linear, {"": state, "second_": getattr(state, "state2", None)})
        return layer  # type: ignore[no-any-return]

    return make


def _keep(layer: nn.Module, linear: nn.Linear, states: Mapping[str, Any]) -> None:
    """Give a layer the bias of another, and the tensors of its quantisation as buffers, so that they are counted."""
    layer.bias = linear.bias
    for prefix, state in states.items():
        for name in ("absmax", "code", "offset"):
            tensor = getattr(state, name, None)
            if isinstance(tensor, torch.Tensor):
                layer.register_buffer(f"{prefix}{name}", tensor, persistent=False)


def _eight_bits(linear: nn.Linear, arguments: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Make a `Linear8bitLt` of bitsandbytes: a byte for a weight, an fp32 scale for a row.

    Columns of outliers, which are multiplied in 16 bits, depend on values: there are none here.
    """
    bnb, functional = _library("bitsandbytes", "int8"), import_module("bitsandbytes.functional")
    codes, scales, _ = functional.int8_vectorwise_quant(linear.weight.detach().to(torch.float16))
    layer = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=0.0, device="meta"
    )
    layer.weight = bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
    layer.bias = linear.bias
    layer.register_buffer("scales", scales, persistent=False)
    return layer  # type: ignore[no-any-return]


def _torchao(linear: nn.Linear, arguments: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Quantise the weight of a layer to int8 by torchao: a byte for a weight, scale and zero point for a row."""
    quantization = _library("torchao.quantization", "torchao's int8")
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    return linear.requires_grad_(False)


_MAKERS: Mapping[str, Make] = {
    "nf4": _four_bits("nf4", double=False),
    "nf4_dq": _four_bits("nf4", double=True),
    "fp4": _four_bits("fp4", double=False),
    "fp4_dq": _four_bits("fp4", double=True),
    "int8": _eight_bits,
    "torchao_int8": _torchao,
    "gptq": gptq_linear,
    "awq": awq_linear,
}
