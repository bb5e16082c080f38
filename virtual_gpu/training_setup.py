"""How a network is trained: every option that decides memory, listed once."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from vramcast.errors import UserError, check_choice, check_count, check_flag

LOSSES = ("cross_entropy", "bce_with_logits", "bce", "mse", "own")
"""'own' is for networks that compute their loss themselves and answer with it, as those of transformers do."""
IMPLEMENTATIONS = ("default", "foreach", "fused", "single")
DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@lru_cache(maxsize=1024)  # bounded: a service is asked for whatever its clients write
def parse_call(text: str) -> tuple[str, Mapping[str, Any]]:
    """Split 'SGD(momentum=0.9)' into its name and its keyword arguments."""
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, MappingProxyType({})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            arguments = {item.arg: ast.literal_eval(item.value) for item in node.keywords if item.arg}
            if len(arguments) == len(node.keywords):  # none twice, and no '**'
                return node.func.id, MappingProxyType(arguments)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: too deeply nested
        pass
    raise UserError(f"expected a name such as 'Adam' or 'SGD(momentum=0.9)', found {text!r}: write it like that")


def canonical_call(text: str) -> str:
    """One text for one call: 'Adam()' is 'Adam', and arguments stand in order."""
    return _call_text(*parse_call(text))


def _call_text(name: str, arguments: Mapping[str, Any]) -> str:
    inner = ", ".join(f"{key}={arguments[key]!r}" for key in sorted(arguments))
    return f"{name}({inner})" if inner else name


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How a network is trained, as far as it decides the memory. What is said in two ways is kept in one."""

    batch_size: int
    last_batch_size: int | None = None
    """The odd last batch of an epoch, None where the batches come out even."""
    loss: str = "cross_entropy"
    optimizer: str = "Adam"
    """A class of torch.optim, with arguments where they matter: 'SGD(momentum=0.9)'."""
    implementation: str = "default"
    """Which implementation of the optimizer: 'default' is what torch picks on CUDA."""
    dtype: str = "fp32"
    """Of parameters and inputs."""
    autocast: str | None = None
    """'bf16' or 'fp16' for mixed precision."""
    accumulate: int = 1
    """Backward passes to one optimizer step."""
    checkpointing: bool = False
    """Each block of the trunk is recomputed in the backward pass."""
    dry_run_batch_size: int | None = None
    """Batch of the forward passes before training (a layer summary, say), None where there were none."""
    dry_run_passes: int = 1
    prefetched_batches: int = 0
    """Batches that a loader puts on the device ahead of time, on a stream of its own."""
    cudnn_benchmark: bool = False
    """torch.backends.cudnn.benchmark: cuDNN tries its algorithms at the first call of each shape."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "last_batch_size", "accumulate", "dry_run_batch_size", "dry_run_passes"):
            if getattr(self, name) is not None:
                check_count(f"training.{name}", getattr(self, name))
        check_count("training.prefetched_batches", self.prefetched_batches, least=0)
        check_choice("training.loss", self.loss, LOSSES)
        check_choice("training.implementation", self.implementation, IMPLEMENTATIONS)
        check_choice("training.dtype", self.dtype, DTYPE_BYTES)
        check_choice("training.autocast", self.autocast, (None, "bf16", "fp16"))
        check_flag("training.checkpointing", self.checkpointing)
        check_flag("training.cudnn_benchmark", self.cudnn_benchmark)
        object.__setattr__(self, "optimizer", canonical_call(str(self.optimizer)))
        if self.dry_run_batch_size is None:
            object.__setattr__(self, "dry_run_passes", 1)

    @property
    def without_rate(self) -> "TrainingSetup":
        """The same without the learning rate, on which no byte depends: a sweep over it is one job many times."""
        name, arguments = parse_call(self.optimizer)
        kept = {key: value for key, value in arguments.items() if key != "lr"}
        return replace(self, optimizer=_call_text(name, kept))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch that a step runs with, in the order in which training meets them."""
        found = (self.dry_run_batch_size, self.batch_size, self.last_batch_size)
        return tuple(dict.fromkeys(size for size in found if size is not None))
