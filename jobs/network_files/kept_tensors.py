"""What the backward pass of an operation keeps, by autograd's formulas (torch, tools/autograd/derivatives.yaml)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """The tensors of one operation that its backward pass reads."""

    inputs: int = 0
    """How many of its inputs, the first ones."""
    output: bool = False
    bytes_per_output: int = 0
    """Of a mask (1) or of indices (8)."""
    floats_per_row: int = 0
    """Statistics of each row of the output, such as mean and deviation."""


VIEW = "view"
"""Stands for all operations that move or rename data."""
_NOTHING, _INPUT, _INPUTS, _OUTPUT = Kept(), Kept(inputs=1), Kept(inputs=2), Kept(output=True)
_POOL, _NORM = Kept(inputs=1, bytes_per_output=8), Kept(inputs=1, floats_per_row=2)

_NAMES: Mapping[Kept, str] = {
    _NOTHING: "add sub rsub neg cat stack mean sum embedding upsample_nearest2d upsample_bilinear2d interpolate "
    "arange zeros ones full zeros_like ones_like eq ne lt gt le ge logical_not roll index gather where_scalar floor "
    f"argmax cross_entropy_loss round sign pixel_shuffle masked_fill tril triu one_hot cumsum pad {VIEW}",
    _INPUT: "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d linear batch_norm "
    "instance_norm group_norm gelu silu mish softplus leaky_relu hardtanh hardswish hardsigmoid prelu log_sigmoid "
    "clamp abs pow log sin cos erf avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d var "
    "var_mean std square relu6 native_batch_norm native_batch_norm_legit_functional native_group_norm",
    _INPUTS: "addmm mm matmul bmm baddbmm einsum mul div where maximum minimum atan2 dot mv lerp addcmul",
    _OUTPUT: "relu sigmoid tanh softmax log_softmax exp sqrt rsqrt elu selu celu reciprocal amax "
    "amin norm logsumexp threshold",
    _POOL: "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool2d max",
    _NORM: "layer_norm rms_norm native_layer_norm",
    Kept(bytes_per_output=1): "dropout feature_dropout alpha_dropout native_dropout bernoulli rrelu",
    Kept(inputs=3, output=True, floats_per_row=1): "scaled_dot_product_attention",
    Kept(inputs=1, output=True): "lstm gru rnn_tanh rnn_relu",
}  # fmt: skip
_KEPT: Mapping[str, Kept] = {name: tensors for tensors, names in _NAMES.items() for name in names.split()}
_UNKNOWN = _INPUTS
"""Most operations with a formula of their own keep their inputs."""


def kept_by(operation: str) -> Kept:
    """Return what an operation of ATen keeps, by its name without overload."""
    return _KEPT.get(operation.strip("_"), _UNKNOWN)
