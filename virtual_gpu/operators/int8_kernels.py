"""Products of bitsandbytes in int8: its CUDA kernels in terms of its other operators, so that temporaries are traced.

bitsandbytes 0.50, backends/cuda/ops.py and backends/default/ops.py.
There are no columns of outliers, which depend on values.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "bitsandbytes"


def _quantized(operators: Any, inputs: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise rows; with a threshold, columns with outliers are looked for first."""
    outliers = None
    if threshold:
        torch.any(inputs.abs() >= threshold)
        outliers = torch.empty(0, dtype=torch.int64, device=inputs.device)
    codes, scales, _ = operators.int8_vectorwise_quant.default(inputs)
    return codes, scales, outliers


def _scaled(
    operators: Any, a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, bias: Any = None, dtype: Any = None
) -> Tensor:
    """Multiply into int32, then scale."""
    product = operators.int8_linear_matmul.default(a, b)
    return operators.int8_mm_dequant.default(product, rows, columns, dtype or torch.float16, bias)  # type: ignore[no-any-return]


def _dequantized(
    operators: Any, product: Tensor, rows: Tensor, columns: Tensor, dtype: Any = None, bias: Any = None
) -> Tensor:
    """Scale a product: the kernel writes fp16, which is converted."""
    return torch.empty_like(product, dtype=torch.float16).to(dtype or torch.float16)


def _mixed(
    operators: Any, inputs: Tensor, a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, outliers: Any = None,
    bias: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply in int8, and columns with outliers in 16 bits."""
    nothing = torch.empty(0, dtype=inputs.dtype, device=inputs.device)
    return operators.int8_scaled_mm.default(a, b, rows, columns, bias, inputs.dtype), nothing


_BY_NAME: Mapping[str, Callable[..., Any]] = {
    "int8_vectorwise_quant": _quantized,
    "int8_scaled_mm": _scaled,
    "int8_mm_dequant": _dequantized,
    "int8_mixed_scaled_mm": _mixed,
}


def _threshold(inputs: Tensor, threshold: float = 0.0) -> float:
    return threshold


def int8_kernel(tracer: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator of bitsandbytes by others that the tracer sees; NotImplemented for all others."""
    name = func._schema.name.partition("::")[2]
    run = _BY_NAME.get(name)
    if run is None or (run is _quantized and not _threshold(*args, **kwargs)):
        return NotImplemented
    with tracer:
        return run(torch.ops.bitsandbytes, *args, **kwargs)
