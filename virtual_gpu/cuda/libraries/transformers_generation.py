"""transformers: `generate` is a phase of its own, and runs to its greatest length (checked on transformers 5.23).

Only a real GPU knows which tokens end a sequence. Without one the greatest length ends it, by three-valued logic. Beam
search asks whether it may stop at every step: an unknown answer is no.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_LONGEST = "a generation runs to its greatest length: only a real GPU knows the tokens that end it"


def _apply(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    mixin: Any = module.GenerationMixin
    original, record = mixin.generate, gpu.record

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        gpu.assumptions.note(_LONGEST)
        record.generating += 1
        try:
            out = original(self, *args, **kwargs)
        finally:
            record.generating -= 1
        if record.generating:  # drafts of an assistant
            return out
        config = kwargs.get("generation_config") or self.generation_config
        token = _token(config, self.generation_config)
        if isinstance(out, Tensor):
            return _without_ends(out, token, gpu)
        if isinstance(getattr(out, "sequences", None), Tensor):
            out["sequences"] = _without_ends(out.sequences, token, gpu)
        return out

    patches.set(mixin, "generate", generate)
    if hasattr(mixin, "_beam_search_has_unfinished_sequences"):
        _beams(mixin, patches, gpu)


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
