"""transformers: `generate` is a phase of its own, and runs to its greatest length (checked on transformers 5.23).

Only a real GPU knows which tokens end a sequence. Without one the greatest length ends it, by three-valued logic. Beam
search asks whether it may stop at every step: an unknown answer is no.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.cuda.run_record import Peak

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_LONGEST = "a generation runs to its greatest length: only a real GPU knows the tokens that end it"
_EQUAL = "a generation like an earlier one is not run again: it would have no new peak"


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    mixin: Any = module.GenerationMixin
    original, record = mixin.generate, gpu.record
    earlier: dict[Any, _Generation] = {}

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        gpu.assumptions.note(_LONGEST)
        config = kwargs.get("generation_config") or self.generation_config
        token = _token(config, self.generation_config)
        key = None if record.generating else _signature(self, args, kwargs)
        if key in earlier and gpu.forward.is_allowed and earlier[key].fits(gpu):
            gpu.assumptions.note(_EQUAL)
            return earlier[key].repeated(args, kwargs, token, gpu)
        before, window = gpu.memory.allocator.allocated_bytes, Peak()
        record.windows.append(window)
        record.generating += 1
        try:
            out = original(self, *args, **kwargs)
        finally:
            record.generating -= 1
            record.windows.remove(window)
        if record.generating:  # drafts of an assistant
            return out
        if isinstance(out, Tensor):
            if key is not None:
                earlier[key] = _Generation(window.allocated_bytes - before, tuple(out.shape))
            return _without_ends(out, token, gpu)
        if isinstance(getattr(out, "sequences", None), Tensor):
            out["sequences"] = _without_ends(out.sequences, token, gpu)
        return out

    patches.set(mixin, "generate", generate)
    if hasattr(mixin, "_beam_search_has_unfinished_sequences"):
        _beams(mixin, patches, gpu)


@dataclass(frozen=True)
class _Generation:
    """A generation that has run."""

    extra_bytes: int
    """Bytes of its peak above those that were allocated before."""
    shape: tuple[int, ...]

    def fits(self, gpu: "CudaEmulation") -> bool:
        """Return True if an equal generation would have no new peak."""
        return gpu.memory.allocator.allocated_bytes + self.extra_bytes <= gpu.record.peak.allocated_bytes

    def repeated(self, args: Any, kwargs: Any, token: int, gpu: "CudaEmulation") -> Tensor:
        """Return what an equal generation would: the prompt with ordinary tokens."""
        out = torch.full(self.shape, token, device=gpu.device)
        prompt = next(item for item in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if item is not None)
        if prompt.dtype == out.dtype and prompt.shape[0] == out.shape[0] and prompt.shape[1] <= out.shape[1]:
            out[:, : prompt.shape[1]] = prompt
        return out


def _signature(network: Any, args: Any, kwargs: Any) -> Any:
    """Return what an equal generation has in common with one; None if its prompt is not tokens."""
    prompt = _prompt(args, kwargs)
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.is_floating_point():
        return None
    shown = [f"{name}={_shown(value)}" for name, value in sorted(kwargs.items())]
    return (id(network), network.training, torch.is_grad_enabled(), *map(_shown, args), *shown)


def _prompt(args: Any, kwargs: Any) -> Any:
    return args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))


def _shown(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _beams(mixin: Any, patches: Patches, gpu: "CudaEmulation") -> None:
    is_unfinished, search = mixin._beam_search_has_unfinished_sequences, mixin._beam_search

    def has_unfinished(*args: Any, **kwargs: Any) -> Any:
        answer = is_unfinished(*args, **kwargs)
        is_unknown = isinstance(answer, Tensor) and gpu.tracer.is_device(answer)
        return True if is_unknown and gpu.tracer.values.of(answer) is None else answer

    def beam_search(self: Any, input_ids: Any, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        """Return sequences of the greatest length: the one that torch cuts them to is not known."""
        out = search(self, input_ids, *args, generation_config=generation_config, **kwargs)
        if not isinstance(out, Tensor):
            out["sequences"] = _lengthened(out["sequences"], generation_config.max_length)
            return out
        return _lengthened(out, generation_config.max_length)

    patches.set(mixin, "_beam_search_has_unfinished_sequences", staticmethod(has_unfinished))
    patches.set(mixin, "_beam_search", beam_search)


def _token(*configs: Any) -> int:
    """Return a token that ends no sequence."""
    special: set[int] = set()
    for config in configs:
        for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
            value = getattr(config, name, None)
            special.update(value if isinstance(value, (list, tuple)) else [] if value is None else [int(value)])
    return next(number for number in range(len(special) + 1) if number not in special)


def _without_ends(sequences: Tensor, token: int, gpu: "CudaEmulation") -> Tensor:
    """Let unknown tokens of a result be an ordinary one, so that all that follows finds sequences of full length."""
    if gpu.tracer.is_device(sequences) and not gpu.tracer.values.assume(sequences, token):
        sequences = sequences.clone()  # a part of a larger tensor
        gpu.tracer.values.assume(sequences, token)
    return sequences


def _lengthened(sequences: Tensor, length: int) -> Tensor:
    missing = length - sequences.shape[1]
    if missing <= 0:
        return sequences
    return torch.cat([sequences, sequences.new_zeros(sequences.shape[0], missing)], 1)


PATCHES = {"transformers.generation.utils": _apply}
