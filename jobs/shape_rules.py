"""The shape specification: the conditions of each layer on its input, and the shape of its output.

TBEM writes ShapeVerify in SOFL, as a process with a pre- and a post-condition. Here every layer is such a process, as
data: `listing()` prints it in that form, and `filters` evaluates the same text. `tests/test_filter_layers.py` compares
it with torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Process:
    """One layer. Conditions are expressions over the dimensions of its input and its arguments."""

    reads: str
    """Names of the input's dimensions; a starred one stands for any number of them."""
    writes: str
    """The output's shape."""
    pre: tuple[str, ...] = ()
    let: Mapping[str, str] = field(default_factory=dict)
    """Quantities of the post-condition, in order."""
    post: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the layer may leave out."""
    parameters: str = "()"
    """Shapes of the parameters."""
    shares: str = "False"
    """An expression: true if the output shares the input's storage."""
    tokens: bool = False
    """True if the input is token indices."""
    shown_as: str | None = None
    """The name of the layer in tables, if it differs from the name of the process."""


_CONVOLUTION = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": True}
_POOLING = Process(
    reads="N, C, H1, W1",
    defaults={"stride": None, "padding": 0},
    let={
        "step": "kernel_size if stride is None else stride",
        "H2": "(H1 + 2 * padding - kernel_size) // step + 1",
        "W2": "(W1 + 2 * padding - kernel_size) // step + 1",
    },
    pre=("kernel_size >= 1", "stride is None or stride >= 1", "0 <= 2 * padding <= kernel_size"),
    post=("H2 >= 1", "W2 >= 1"),
    writes="(N, C, H2, W2)",
)
_ELEMENTWISE = Process(reads="*S", writes="S")
_ATTENTION = Process(
    reads="N, L, E",
    pre=("E == embed_dim", "embed_dim % num_heads == 0"),
    writes="(N, L, E)",
    parameters="((3 * E, E), (3 * E,), (E, E), (E,))",
)

SPECIFICATION: Mapping[str, Process] = {
    "Conv2d": Process(
        reads="N, C, H1, W1",
        defaults=_CONVOLUTION,
        pre=(
            "kernel_size >= 1 and stride >= 1 and dilation >= 1 and groups >= 1 and out_channels >= 1 and padding >= 0",
            "C == in_channels",
            "in_channels % groups == 0",
            "out_channels % groups == 0",
            "H1 + 2 * padding >= dilation * (kernel_size - 1) + 1",
            "W1 + 2 * padding >= dilation * (kernel_size - 1) + 1",
        ),
        let={
            "H2": "(H1 + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1",
            "W2": "(W1 + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1",
        },
        post=("H2 >= 1", "W2 >= 1"),
        writes="(N, out_channels, H2, W2)",
        parameters="((out_channels, in_channels // groups, kernel_size, kernel_size), "
        "*([(out_channels,)] if bias else ()))",
    ),
    "MaxPool2d": _POOLING,
    "AvgPool2d": _POOLING,
    "AdaptiveAvgPool2d": Process(reads="N, C, H1, W1", writes="(N, C, output_size, output_size)"),
    "Linear": Process(
        reads="*B, F",
        defaults={"bias": True},
        pre=("F == in_features",),
        writes="(*B, out_features)",
        parameters="((out_features, in_features), *([(out_features,)] if bias else ()))",
    ),
    "BatchNorm1d": Process(
        reads="N, F, *L",
        pre=("F == num_features", "len(L) <= 1", "N * prod(L) > 1"),
        writes="(N, F, *L)",
        parameters="((F,), (F,))",
    ),
    "BatchNorm2d": Process(
        reads="N, C, H, W",
        pre=("C == num_features", "N * H * W > 1"),
        writes="(N, C, H, W)",
        parameters="((C,), (C,))",
    ),
    "InstanceNorm2d": Process(
        reads="N, C, H, W",
        defaults={"affine": False},
        pre=("C == num_features or not affine", "H * W > 1"),  # without weights, torch only warns about other channels
        writes="(N, C, H, W)",
        parameters="((C,), (C,)) if affine else ()",
    ),
    "GroupNorm": Process(
        reads="N, C, *S",
        pre=("C == num_channels", "num_channels % num_groups == 0", "N * C // num_groups * prod(S) > 1"),
        writes="(N, C, *S)",
        parameters="((C,), (C,))",
    ),
    "LayerNorm": Process(reads="*B, F", pre=("F == normalized_shape",), writes="(*B, F)", parameters="((F,), (F,))"),
    "PReLU": Process(reads="*S", writes="S", parameters="((1,),)"),
    "Dropout": Process(reads="*S", defaults={"p": 0.5}, writes="S", shares="p == 0"),
    "Softmax": Process(reads="*S", pre=("-len(S) <= dim < len(S)",), writes="S"),
    "Flatten": Process(reads="N, *S", pre=("len(S) >= 1",), writes="(N, prod(S))", shares="True"),
    "Identity": Process(reads="*S", writes="S", shares="True"),
    "Embedding": Process(
        reads="*B", tokens=True, writes="(*B, embedding_dim)", parameters="((num_embeddings, embedding_dim),)"
    ),
    "LearnedPositions": Process(
        reads="N, L, E",
        pre=("L == length or L == 1 or length == 1", "E == size or E == 1 or size == 1"),
        writes="(N, max(L, length), max(E, size))",
        parameters="((1, length, size),)",
    ),
    "MeanOverSequence": Process(reads="N, L, *S", writes="(N, *S)"),
    "MultiheadAttention": _ATTENTION,
    "CrossAttention": Process(
        reads="N, L, E",
        pre=(*_ATTENTION.pre, "len(memory) == 3", "memory[0] == N", "memory[2] == E"),
        writes=_ATTENTION.writes,
        parameters=_ATTENTION.parameters,
        shown_as="MultiheadAttention",
    ),
    "scaled_dot_product_attention": Process(
        reads="N, L, E", pre=("E % (3 * num_heads) == 0",), writes="(N, num_heads, L, E // 3 // num_heads)"
    ),
    "add": Process(
        reads="*A",
        pre=("all(x == y or x == 1 or y == 1 for x, y in zip(A[::-1], other[::-1]))",),
        writes="broadcast(A, other)",
    ),
    "cat": Process(
        reads="N, C, *S",
        pre=("all(len(x) == 2 + len(S) for x in others)", "all(x[0] == N and x[2:] == S for x in others)"),
        writes="(N, C + sum_of_channels(others), *S)",
    ),
    **dict.fromkeys(
        ("ReLU", "LeakyReLU", "ELU", "SELU", "Tanh", "Softplus", "SiLU", "Mish", "GELU", "Sigmoid", "relu", "gelu"),
        _ELEMENTWISE,
    ),
}


@dataclass(frozen=True)
class TrainingRule:
    """A condition on the training setup, and the reason for a rejection."""

    condition: str
    reason: str


TRAINING_RULES: tuple[TrainingRule, ...] = (
    TrainingRule("optimizer not in refused", "{refused_because}"),
    TrainingRule("optimizer in optimizers", "no optimizer {optimizer}: choose one of {optimizers}"),
    TrainingRule("len(unknown_arguments) == 0", "{optimizer} takes {known_arguments} here, found {unknown_arguments}"),
    TrainingRule("len(broken_demands) == 0", "{optimizer} expects {broken_demands}, found {arguments}"),
    TrainingRule(
        "implementation in implementations",
        "{optimizer} has no {implementation} implementation, only {implementations}",
    ),
    TrainingRule("adapter is None", "adapters are for networks of libraries and users, these are trained whole"),
    TrainingRule("loss != 'own'", "the loss own is for networks that compute their loss: choose one of torch's"),
    TrainingRule(
        "loss != 'bce' or last_layer in ('Sigmoid', 'Softmax')",
        "the loss bce reads probabilities, the last layer is {last_layer}: use bce_with_logits or a sigmoid head",
    ),
    TrainingRule(
        "loss != 'bce' or autocast is None",
        "torch refuses the loss bce under autocast: use bce_with_logits",
    ),
    TrainingRule(
        "autocast != 'fp16' or dtype != 'fp16' or implementation == 'fused'",
        "autocast fp16 scales the loss, and only a fused optimizer unscales gradients in fp16: use dtype fp32",
    ),
    TrainingRule(
        "last_batch_size is None or last_batch_size < batch_size",
        "the last batch {last_batch_size} is not smaller than {batch_size}",
    ),
)


def listing() -> str:
    """Return the specification as SOFL-like text."""
    return "\n\n".join(_process_listing(name, process) for name, process in SPECIFICATION.items())


def _process_listing(name: str, process: Process) -> str:
    kind = "set of nat (tokens)" if process.tokens else "set of nat"
    defaults = ", ".join(f"{key} = {value}" for key, value in process.defaults.items())
    post = [f"{key} = {text}" for key, text in process.let.items()] + list(process.post)
    lines = [f"process {name} (Input = [{process.reads}]: {kind}{'; default ' + defaults if defaults else ''})"]
    lines.append("pre  " + "\n and ".join(process.pre or ("true",)))
    lines.append("post " + "\n and ".join([*post, f"Output = {process.writes}"]))
    lines.append("end_process")
    return "\n".join(lines)
