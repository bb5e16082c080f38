"""Sizes of Keras' layers: the output and the weights of each class from its settings and the shape of its input.

Shapes have no batch and are in Keras' order. `tests/test_network_files.py` compares them with what Keras says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vramcast.errors import UserError
from vramcast.jobs.network_files.limits import checked_shape, shown

Shape = tuple[int, ...]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Sized:
    """One layer with its sizes."""

    kind: str
    """The class of torch.nn that does the same."""
    formula: str
    output: Shape
    weights: tuple[Shape, ...] = ()
    buffers: tuple[Shape, ...] = ()
    fresh: bool = True
    kernel: Shape = ()
    stride: Shape = ()
    groups: int | None = None


def count(settings: Settings, name: str, default: int | None = None) -> int:
    """Return a setting that is a whole number."""
    value = settings.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**40:
        raise UserError(f"expected {name} of a Keras layer as a whole number from 1, found {shown(value)}: fix it")
    return value


def sizes(settings: Settings, name: str, rank: int, default: Any = 1) -> Shape:
    """Return a setting of one number for each dimension of space."""
    value = settings.get(name)
    value = default if value is None else value
    return checked_shape([value] * rank if isinstance(value, int) else value, name, least=1)


def parted(settings: Settings, shape: Shape, rank: int) -> tuple[Shape, int]:
    """Return the dimensions of space and the channels of an input."""
    if len(shape) != rank + 1:
        raise UserError(
            f"expected an input of {rank + 1} sizes for {shown(settings.get('name', 'a layer'))}, found {shape}: fix it"
        )
    first = settings.get("data_format") == "channels_first"
    return (shape[1:], shape[0]) if first else (shape[:-1], shape[-1])


def joined(settings: Settings, space: Shape, channels: int) -> Shape:
    """Return a shape in the order of the layer."""
    return (channels, *space) if settings.get("data_format") == "channels_first" else (*space, channels)


def _windows(settings: Settings, space: Shape, kernel: Shape, stride: Shape) -> Shape:
    """Return the number of places of a window in each dimension."""
    dilation = sizes(settings, "dilation_rate", len(space))
    padding = settings.get("padding", "valid")
    places = []
    for size, width, step, gap in zip(space, kernel, stride, dilation, strict=True):
        span = (width - 1) * gap + 1
        room = size if padding in ("same", "causal") else size - span + 1
        if room < 1:
            raise UserError(
                f"expected an input of at least {span} for {shown(settings.get('name', ''))}, found {size}: fix it"
            )
        places.append(-(-room // step))
    return tuple(places)


def _bias(settings: Settings, width: int) -> tuple[Shape, ...]:
    return ((width,),) if settings.get("use_bias", True) else ()


def _convolution(rank: int, depthwise: bool = False, separable: bool = False) -> Callable[[Settings, Shape], Sized]:
    def rule(settings: Settings, shape: Shape) -> Sized:
        space, channels = parted(settings, shape, rank)
        kernel, stride = sizes(settings, "kernel_size", rank), sizes(settings, "strides", rank)
        groups = count(settings, "groups", 1)
        wide = channels * count(settings, "depth_multiplier", 1)
        filters = wide if depthwise else count(settings, "filters")
        weights: tuple[Shape, ...] = ((*kernel, channels // groups, filters),)
        if depthwise:
            weights = ((*kernel, channels, wide // channels),)
            groups = channels
        elif separable:
            weights = ((*kernel, channels, wide // channels), (*(1,) * rank, wide, filters))
        output = joined(settings, _windows(settings, space, kernel, stride), filters)
        return Sized(f"Conv{rank}d", f"conv{rank}d", output, (*weights, *_bias(settings, filters)), kernel=kernel,
                     stride=stride, groups=groups)  # fmt: skip

    return rule


def _transposed(rank: int) -> Callable[[Settings, Shape], Sized]:
    def rule(settings: Settings, shape: Shape) -> Sized:
        space, channels = parted(settings, shape, rank)
        kernel, stride = sizes(settings, "kernel_size", rank), sizes(settings, "strides", rank)
        filters, valid = count(settings, "filters"), settings.get("padding", "valid") == "valid"
        grown = tuple(
            size * step + max(width - step, 0) * valid for size, width, step in zip(space, kernel, stride, strict=True)
        )
        weights = ((*kernel, filters, channels), *_bias(settings, filters))
        output = joined(settings, grown, filters)
        return Sized(f"ConvTranspose{rank}d", f"conv_transpose{rank}d", output, weights, kernel=kernel, stride=stride)

    return rule


def _pooling(rank: int, kind: str, formula: str) -> Callable[[Settings, Shape], Sized]:
    def rule(settings: Settings, shape: Shape) -> Sized:
        space, channels = parted(settings, shape, rank)
        kernel = sizes(settings, "pool_size", rank, 2)
        stride = sizes(settings, "strides", rank, list(kernel))
        output = joined(settings, _windows(settings, space, kernel, stride), channels)
        return Sized(f"{kind}{rank}d", f"{formula}{rank}d", output, kernel=kernel, stride=stride)

    return rule


def _global(rank: int, kind: str, formula: str) -> Callable[[Settings, Shape], Sized]:
    def rule(settings: Settings, shape: Shape) -> Sized:
        _, channels = parted(settings, shape, rank)
        output = joined(settings, (1,) * rank, channels) if settings.get("keepdims") else (channels,)
        return Sized(f"{kind}{rank}d", formula, output)

    return rule


def _dense(settings: Settings, shape: Shape) -> Sized:
    units = count(settings, "units")
    if not shape:
        raise UserError("expected an input with features for a Dense layer, found one number a sample: fix it")
    return Sized("Linear", "linear", (*shape[:-1], units), ((shape[-1], units), *_bias(settings, units)))


def _embedding(settings: Settings, shape: Shape) -> Sized:
    rows, width = count(settings, "input_dim"), count(settings, "output_dim")
    return Sized("Embedding", "embedding", (*shape, width), ((rows, width),))


def _axis(settings: Settings, shape: Shape) -> int:
    axis = settings.get("axis", -1)
    axis = axis[-1] if isinstance(axis, list) and axis else axis
    if not isinstance(axis, int) or not shape or not -len(shape) <= axis <= len(shape) or axis == 0:
        raise UserError(f"expected an axis of the input in a normalisation, found {shown(axis)}: fix it")
    return shape[axis if axis < 0 else axis - 1]


def _scales(settings: Settings, width: int) -> tuple[Shape, ...]:
    return tuple((width,) for name in ("scale", "center") if settings.get(name, True))


def _batch_norm(settings: Settings, shape: Shape) -> Sized:
    width = _axis(settings, shape)
    kind = f"BatchNorm{min(max(len(shape) - 1, 1), 3)}d"
    return Sized(kind, "batch_norm", shape, _scales(settings, width), ((width,), (width,)))


def _norm(kind: str, formula: str) -> Callable[[Settings, Shape], Sized]:
    return lambda settings, shape: Sized(kind, formula, shape, _scales(settings, _axis(settings, shape)))


def _same(kind: str, formula: str, fresh: bool = True) -> Callable[[Settings, Shape], Sized]:
    return lambda settings, shape: Sized(kind, formula, shape, fresh=fresh)


def _prelu(settings: Settings, shape: Shape) -> Sized:
    shared = settings.get("shared_axes") or []
    if not isinstance(shared, list):
        raise UserError(f"expected shared_axes of a PReLU as a list, found {shown(shared)}: fix it")
    return Sized(
        "PReLU", "prelu", shape, (tuple(1 if place + 1 in shared else size for place, size in enumerate(shape)),)
    )


def _flatten(settings: Settings, shape: Shape) -> Sized:
    return Sized("Flatten", "view", (prod(shape),), fresh=False)


def _reshape(settings: Settings, shape: Shape) -> Sized:
    target = settings.get("target_shape")
    if not isinstance(target, list) or len(target) > 16 or not all(isinstance(size, int) for size in target):
        raise UserError(f"expected target_shape as whole numbers, found {shown(target)}: fix it")
    elements = prod(size for size in target if size != -1)
    if not elements:
        raise UserError(f"expected target_shape without a zero, found {shown(target)}: fix it")
    sizes_of_target = [prod(shape) // elements if size == -1 else size for size in target]
    return Sized("Reshape", "view", checked_shape(sizes_of_target, "a reshape"), fresh=False)


def _permute(settings: Settings, shape: Shape) -> Sized:
    order = settings.get("dims")
    if not isinstance(order, list) or sorted(order, key=str) != sorted(range(1, len(shape) + 1), key=str):
        raise UserError(f"expected dims of a Permute as an order of {len(shape)} places, found {shown(order)}: fix it")
    return Sized("Permute", "view", tuple(shape[place - 1] for place in order), fresh=False)


def _repeat(settings: Settings, shape: Shape) -> Sized:
    return Sized("repeat", "add", (count(settings, "n"), *shape))


def _padding(sign: int, name: str) -> Callable[[Settings, Shape], Sized]:
    def rule(settings: Settings, shape: Shape) -> Sized:
        rank = len(shape) - 1
        space, channels = parted(settings, shape, rank)
        amounts = settings.get(name, 1)
        pairs = [amounts] * rank if isinstance(amounts, int) else amounts
        if rank == 1 and isinstance(pairs, list) and len(pairs) == 2:
            pairs = [pairs]
        if not isinstance(pairs, list) or len(pairs) != rank:
            raise UserError(f"expected {name} for {rank} dimensions, found {shown(amounts)}: fix it")
        added = [sum(checked_shape([pair, pair] if isinstance(pair, int) else pair, name)) for pair in pairs]
        grown = checked_shape([size + sign * more for size, more in zip(space, added, strict=True)], name, least=1)
        return Sized("pad" if sign > 0 else "slice", "pad", joined(settings, grown, channels))

    return rule


def _upsampling(rank: int) -> Callable[[Settings, Shape], Sized]:
    def rule(settings: Settings, shape: Shape) -> Sized:
        space, channels = parted(settings, shape, rank)
        factors = sizes(settings, "size", rank, 2)
        grown = tuple(size * factor for size, factor in zip(space, factors, strict=True))
        return Sized("Upsample", "interpolate", joined(settings, grown, channels))

    return rule


def _recurrent(kind: str, gates: int) -> Callable[[Settings, Shape], Sized]:
    def rule(settings: Settings, shape: Shape) -> Sized:
        if len(shape) != 2:
            raise UserError(f"expected an input of steps and features for {kind}, found {shape}: fix it")
        units = count(settings, "units")
        rows = 2 if kind == "GRU" and settings.get("reset_after", True) else 1
        bias = ((rows * gates * units,),) if settings.get("use_bias", True) else ()
        output = (shape[0], units) if settings.get("return_sequences") else (units,)
        return Sized(kind, kind.lower(), output, ((shape[1], gates * units), (units, gates * units), *bias))

    return rule


def attention(settings: Settings, query: Shape, value: Shape) -> Sized:
    """Return an attention with several heads over a query and a value."""
    heads, key = count(settings, "num_heads"), count(settings, "key_dim")
    values = count(settings, "value_dim") if settings.get("value_dim") else key
    if len(query) < 2 or len(value) < 2:
        raise UserError(f"expected inputs of steps and features for an attention, found {query} and {value}: fix it")
    stated = settings.get("output_shape")
    width = stated[-1] if isinstance(stated, list) and stated else stated if isinstance(stated, int) else query[-1]
    matrices = (
        (query[-1], heads * key),
        (value[-1], heads * key),
        (value[-1], heads * values),
        (heads * values, width),
    )
    biases = ((heads * key,), (heads * key,), (heads * values,), (width,)) if settings.get("use_bias", True) else ()
    output = checked_shape((*query[:-1], width), "an attention")
    return Sized("MultiheadAttention", "scaled_dot_product_attention", output, (*matrices, *biases))


def merged(kind: str, settings: Settings, shapes: Sequence[Shape]) -> Sized:
    """Return the sum, product or concatenation of several inputs."""
    if kind == "Concatenate":
        axis = settings.get("axis", -1)
        rank = len(shapes[0])
        place = axis if isinstance(axis, int) and axis < 0 else axis - 1 if isinstance(axis, int) else rank
        if any(len(shape) != rank for shape in shapes) or not -rank <= place < rank:
            raise UserError(
                f"expected inputs of one rank for a concatenation, found {shown(repr(list(shapes)))}: fix it"
            )
        output = list(shapes[0])
        output[place] = sum(shape[place] for shape in shapes)
        return Sized("cat", "cat", tuple(output))
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    name = {"Multiply": "mul", "Subtract": "sub", "Divide": "div", "Maximum": "maximum", "Minimum": "minimum"}.get(
        kind, "add"
    )
    return Sized(name, name, tuple(max(column) for column in zip(*padded, strict=True)))


MERGES = frozenset(
    {"Add", "Multiply", "Subtract", "Divide", "TrueDivide", "Average", "Maximum", "Minimum", "Concatenate"}
)
ACTIVATIONS: Mapping[str, tuple[str, str]] = {
    "relu": ("ReLU", "relu"), "relu6": ("ReLU6", "hardtanh"), "elu": ("ELU", "elu"), "selu": ("SELU", "selu"),
    "gelu": ("GELU", "gelu"), "tanh": ("Tanh", "tanh"), "sigmoid": ("Sigmoid", "sigmoid"), "silu": ("SiLU", "silu"),
    "swish": ("SiLU", "silu"), "softmax": ("Softmax", "softmax"), "softplus": ("Softplus", "softplus"),
    "mish": ("Mish", "mish"), "leaky_relu": ("LeakyReLU", "leaky_relu"), "hard_swish": ("Hardswish", "hardswish"),
    "hard_silu": ("Hardswish", "hardswish"), "hard_sigmoid": ("Hardsigmoid", "hardsigmoid"),
    "log_softmax": ("LogSoftmax", "log_softmax"), "exponential": ("exp", "exp"), "softsign": ("Softsign", "silu"),
}  # fmt: skip
RULES: Mapping[str, Callable[[Settings, Shape], Sized]] = {
    **{f"Conv{rank}D": _convolution(rank) for rank in (1, 2, 3)},
    **{f"Conv{rank}DTranspose": _transposed(rank) for rank in (1, 2, 3)},
    **{f"DepthwiseConv{rank}D": _convolution(rank, depthwise=True) for rank in (1, 2)},
    **{f"SeparableConv{rank}D": _convolution(rank, separable=True) for rank in (1, 2)},
    **{f"MaxPooling{rank}D": _pooling(rank, "MaxPool", "max_pool") for rank in (1, 2, 3)},
    **{f"AveragePooling{rank}D": _pooling(rank, "AvgPool", "avg_pool") for rank in (1, 2, 3)},
    **{f"GlobalAveragePooling{rank}D": _global(rank, "AdaptiveAvgPool", "mean") for rank in (1, 2, 3)},
    **{f"GlobalMaxPooling{rank}D": _global(rank, "AdaptiveMaxPool", "amax") for rank in (1, 2, 3)},
    **{f"ZeroPadding{rank}D": _padding(1, "padding") for rank in (1, 2, 3)},
    **{f"Cropping{rank}D": _padding(-1, "cropping") for rank in (1, 2, 3)},
    **{f"UpSampling{rank}D": _upsampling(rank) for rank in (1, 2, 3)},
    "Dense": _dense, "Embedding": _embedding, "BatchNormalization": _batch_norm,
    "LayerNormalization": _norm("LayerNorm", "layer_norm"), "GroupNormalization": _norm("GroupNorm", "group_norm"),
    "RMSNormalization": lambda settings, shape: Sized("RMSNorm", "rms_norm", shape, ((_axis(settings, shape),),)),
    "UnitNormalization": _same("div", "div"), "Dropout": _same("Dropout", "dropout"),
    "SpatialDropout1D": _same("Dropout1d", "dropout"), "SpatialDropout2D": _same("Dropout2d", "dropout"),
    "AlphaDropout": _same("AlphaDropout", "dropout"), "GaussianDropout": _same("Dropout", "mul"),
    "GaussianNoise": _same("add", "add"), "ActivityRegularization": _same("Identity", "view", fresh=False),
    "Identity": _same("Identity", "view", fresh=False), "Masking": _same("mul", "mul"),
    "ReLU": _same("ReLU", "relu"), "LeakyReLU": _same("LeakyReLU", "leaky_relu"), "ELU": _same("ELU", "elu"),
    "Softmax": _same("Softmax", "softmax"), "PReLU": _prelu, "Rescaling": _same("mul", "add"),
    "Normalization": _same("sub", "add"), "Flatten": _flatten, "Reshape": _reshape, "Permute": _permute,
    "RepeatVector": _repeat, "LSTM": _recurrent("LSTM", 4), "GRU": _recurrent("GRU", 3),
    "SimpleRNN": _recurrent("RNN", 1),
}  # fmt: skip
