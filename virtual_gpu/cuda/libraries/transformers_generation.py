"""transformers: `generate` is a phase of its own, and runs to its greatest length (checked on transformers 5.23).

Only a real GPU knows which tokens end a sequence. Without one the greatest length ends it, by three-valued logic. Beam
search asks whether it may stop at every step: an unknown answer is no.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.devices import META
from vramcast.virtual_gpu.cuda.libraries.transformers_decoding import (
    decoding,
    prompt_of,
    rehearsal_of,
    watch_decoding,
)
from vramcast.virtual_gpu.cuda.patches import Patches
from vramcast.virtual_gpu.cuda.run_record import Peak

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_LONGEST = "a generation runs to its greatest length: only a real GPU knows the tokens that end it"
_AS_PROMPT = ("inputs", "input_ids", "attention_mask")
_EQUAL = "a generation like an earlier one with a prompt as long is not run again: it would have no new peak"


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    mixin: Any = module.GenerationMixin
    original, record = mixin.generate, gpu.record
    earlier: dict[Any, list[_Generation]] = {}

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gpu.decodings and gpu.decodings[-1].is_rehearsal:
            return original(self, *args, **kwargs)
        gpu.assumptions.note(_LONGEST)
        config = kwargs.get("generation_config") or self.generation_config
        token = _token(config, self.generation_config)
        prompt = prompt_of(args, kwargs)
        key = None if record.generating else _signature(self, prompt, args, kwargs)
        if gpu.forward.is_allowed:
            for item in earlier.get(key, ()):
                if item.covers(prompt, gpu):
                    gpu.assumptions.note(_EQUAL)
                    return item.repeated(prompt, token, gpu)
        before, window = gpu.memory.allocator.allocated_bytes, Peak()
        rehearse = None if gpu.runs_all_steps else rehearsal_of(original, self, args, kwargs, config, token)
        with _counted(gpu, window), decoding(gpu, rehearse) as steps:
            out = original(self, *args, **kwargs)
        if record.generating:  # drafts of an assistant
            return out
        if isinstance(out, Tensor):
            if steps.length is not None:
                out = _of_length(out, steps.length, gpu)
            if key is not None:
                keeps_prompt = not self.config.is_encoder_decoder and _counts_new_tokens(config, kwargs)
                extra = window.allocated_bytes - before
                earlier.setdefault(key, []).append(_Generation(extra, tuple(out.shape), prompt.shape[1], keeps_prompt))
            return _without_ends(out, token, gpu)
        if isinstance(getattr(out, "sequences", None), Tensor):
            out["sequences"] = _without_ends(out.sequences, token, gpu)
        return out

    patches.set(mixin, "generate", generate)
    watch_decoding(module, patches, gpu)
    if hasattr(mixin, "_beam_search_has_unfinished_sequences"):
        _beams(mixin, patches, gpu)


@contextmanager
def _counted(gpu: "CudaEmulation", window: Peak) -> Iterator[None]:
    """Let what runs be a generation, and its peak one of the window."""
    record = gpu.record
    record.windows.append(window)
    record.generating += 1
    try:
        yield
    finally:
        record.generating -= 1
        record.windows.remove(window)


@dataclass(frozen=True)
class _Generation:
    """A generation that has run."""

    extra_bytes: int
    """Bytes of its peak above those that were allocated before."""
    shape: tuple[int, ...]
    prompt: int
    """The length of its prompt."""
    grows_with_prompt: bool

    def covers(self, prompt: Tensor, gpu: "CudaEmulation") -> bool:
        """Return True if a generation behind another prompt would have no new peak."""
        fits = gpu.memory.allocator.allocated_bytes + self.extra_bytes <= gpu.record.peak.allocated_bytes
        return fits and prompt.shape[1] <= self.prompt

    def repeated(self, prompt: Tensor, token: int, gpu: "CudaEmulation") -> Tensor:
        """Return what a generation behind another prompt would: the prompt with ordinary tokens."""
        rows, length = self.shape
        length -= self.prompt - prompt.shape[1] if self.grows_with_prompt else 0
        out = torch.full((rows, length), token, device=gpu.device)
        if prompt.dtype == out.dtype and prompt.shape[0] == rows and prompt.shape[1] <= length:
            out[:, : prompt.shape[1]] = prompt
        return out


def _counts_new_tokens(config: Any, kwargs: Any) -> bool:
    return any(value is not None for value in (kwargs.get("max_new_tokens"), getattr(config, "max_new_tokens", None)))


def _signature(network: Any, prompt: Any, args: Any, kwargs: Any) -> Any:
    """Return what a generation has in common with one that differs in the length of its prompt alone.

    Return None if its prompt is not tokens.
    """
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.is_floating_point():
        return None
    shown = [
        f"{name}={_shown(value, prompt.shape if name in _AS_PROMPT else None)}"
        for name, value in sorted(kwargs.items())
    ]
    first = [_shown(item, prompt.shape) for item in args]
    return (id(network), network.training, torch.is_grad_enabled(), prompt.shape[0], *first, *shown)


def _shown(value: Any, of_prompt: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {'as the prompt' if value.shape == of_prompt else tuple(value.shape)}"


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


def _of_length(sequences: Tensor, length: int, gpu: "CudaEmulation") -> Tensor:
    """Return sequences of a greater length, whose block is as large already."""
    with gpu.users_meta():
        longer = torch.empty(sequences.shape[0], length, dtype=sequences.dtype, device=META)
    gpu.tracer.hand_over(sequences.untyped_storage(), longer.untyped_storage())
    longer[:, : sequences.shape[1]] = sequences
    return longer


def _lengthened(sequences: Tensor, length: int) -> Tensor:
    missing = length - sequences.shape[1]
    if missing <= 0:
        return sequences
    return torch.cat([sequences, sequences.new_zeros(sequences.shape[0], missing)], 1)


PATCHES = {"transformers.generation.utils": _apply}
