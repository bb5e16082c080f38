"""transformers: a long generation runs some of its steps, and the others are known from them (checked on 5.23).

Once steps repeat with sizes that grow evenly, the last steps are run apart, with a prompt of nearly the full length. If
they are as foreseen, all steps between go through the allocator without being run, and the generation ends.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.decoding_steps import Continuation, DecodingSteps
from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_LEAST_LEFT = 16
"""Steps to come for which running the last ones apart pays."""
_COMPARED = 2
"""The last steps of a generation that is run apart are compared with what is foreseen."""
_OWN_CODE = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "streamer",
             "custom_generate", "past_key_values", "inputs_embeds")  # fmt: skip
"""Arguments with which a generation is run to its end."""
_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
_LOGGER = "transformers.generation.utils"
_KNOWN_STEPS = (
    "steps of a generation that only repeat the ones before them, in sizes that grow evenly, are not run; the last two "
    "were, apart from the others, and are as foreseen"
)


class Decoding:
    """The steps of one generation by sampling.

    Args:
        gpu: The virtual GPU.
        rehearse: Generates behind a prompt of a length some tokens; None where that is not possible.
    """

    def __init__(self, gpu: "CudaEmulation", rehearse: Callable[[int, int], None] | None) -> None:
        self.steps = DecodingSteps()
        self.is_sampling = self.is_rehearsal = False
        self.length: int | None = None
        """To which the generation would have come, had it not ended early."""
        self._gpu = gpu
        self._rehearse = rehearse
        self._refuted: set[int] = set()
        """Periods by which the last steps were not foreseen."""
        self._events = gpu.tracer.trace.events
        self._start: int | None = None
        self._dropped = 0

    @classmethod
    def rehearsed(cls, gpu: "CudaEmulation", events: list[tuple[int, int]]) -> "Decoding":
        """Return the steps of a generation whose events reach no device."""
        steps = cls(gpu, None)
        steps._events, steps.is_rehearsal = events, True
        return steps

    def end_step(self, length: int, criteria: Any) -> bool:
        """Note that a token was chosen; return True if all others are known by now."""
        with self._gpu.memory.at_rest():  # what is free by now is in the trace
            count, dropped = len(self._events), self._gpu.history.dropped_events
        if self._start is not None and dropped == self._dropped:
            self.steps.add(self._events[self._start : count])
        elif self._start is not None:  # the history has forgotten a part of the step
            self.steps = DecodingSteps()
        self._start, self._dropped = count, dropped
        left = (criteria.max_length or 0) - length
        if self._rehearse is None or left < _LEAST_LEFT or not _all_known(criteria):
            return False
        for period in self.steps.periods():
            if left % period == 0 and period not in self._refuted:
                if self._is_foreseen(self._rehearse, left, length, period):
                    self._jump(left, period)
                    self.length = criteria.max_length
                    return True
                self._refuted.add(period)
        return False

    def _is_foreseen(self, rehearse: Callable[[int, int], None], left: int, length: int, period: int) -> bool:
        before = self.steps.oldest(period)  # steps that free blocks of the prompt
        tokens = 1 + before + _COMPARED
        with _rehearsal(self._gpu) as run_apart:
            rehearse(length + left - tokens, tokens)
        later = run_apart.steps.steps[before:]
        return len(later) == _COMPARED and self.steps.foresees(later, left, period)

    def _jump(self, count: int, period: int) -> None:
        """Play the steps to come, and let the tensors of the generation have the blocks of the last one."""
        gpu, tracer = self._gpu, self._gpu.tracer
        continuation = Continuation(self.steps, period, tracer.birth_like, tracer._emit)
        try:
            continuation.play(count)
        finally:
            tracer.rename(continuation.replacements())
        gpu.record.calls["generation"] += count
        gpu.assumptions.note(_KNOWN_STEPS)


@contextmanager
def decoding(gpu: "CudaEmulation", rehearse: Callable[[int, int], None] | None) -> Iterator[Decoding]:
    """Follow the steps of a generation."""
    steps = Decoding(gpu, rehearse)
    gpu.decodings.append(steps)
    try:
        yield steps
    finally:
        gpu.decodings.remove(steps)


@contextmanager
def _rehearsal(gpu: "CudaEmulation") -> Iterator[Decoding]:
    """Let a generation run whose memory and calls do not count."""
    record = gpu.record
    calls, evaluated = Counter(record.calls), record.evaluated_calls
    logger = logging.getLogger(_LOGGER)
    is_disabled, logger.disabled = logger.disabled, True  # lengths of a configuration do not fit it
    with gpu.tracer.rehearsal() as events, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = Decoding.rehearsed(gpu, events)
        gpu.decodings.append(steps)
        try:
            yield steps
        finally:
            gpu.decodings.remove(steps)
            logger.disabled = is_disabled
            record.calls, record.evaluated_calls = calls, evaluated


def watch_decoding(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """End a generation by sampling once all steps to come are known."""
    criteria_class: Any = module.StoppingCriteriaList
    mixin: Any = module.GenerationMixin
    check, sample = criteria_class.__call__, mixin._sample

    def is_done(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = check(self, input_ids, *args, **kwargs)
        steps = gpu.decodings[-1] if gpu.decodings else None
        if steps is not None and steps.is_sampling and steps.end_step(input_ids.shape[1], self):
            return torch.ones_like(out)
        return out

    def sampled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not gpu.decodings:
            return sample(self, *args, **kwargs)
        gpu.decodings[-1].is_sampling = True
        try:
            return sample(self, *args, **kwargs)
        finally:
            gpu.decodings[-1].is_sampling = False

    patches.set(criteria_class, "__call__", is_done)
    patches.set(mixin, "_sample", sampled)


def rehearsal_of(
    generate: Callable[..., Any], network: Any, args: Any, kwargs: dict[str, Any], config: Any, token: int
) -> Callable[[int, int], None] | None:
    """Return what generates some tokens behind a longer prompt, None where a prompt cannot be made longer."""
    prompt = prompt_of(args, kwargs)
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.is_floating_point() or len(args) > 1:
        return None
    outputs = (kwargs.get(name, getattr(config, name, None)) for name in _OUTPUTS)
    if any(kwargs.get(name) is not None for name in _OWN_CODE) or kwargs.get("synced_gpus") or any(outputs):
        return None
    named = {name: value for name, value in kwargs.items() if name not in ("max_length", "inputs", "input_ids")}
    if network.config.is_encoder_decoder:
        start = getattr(config, "decoder_start_token_id", None)
        start = network.config.decoder_start_token_id if start is None else start

        def longer(length: int) -> dict[str, Any]:
            tokens = torch.full((len(prompt), length), start, device=prompt.device)
            return {**named, "inputs": prompt, "decoder_input_ids": tokens}

    else:
        mask = named.get("attention_mask")
        others = [value for name, value in named.items() if isinstance(value, Tensor) and name != "attention_mask"]
        if any(item.dim() > 1 and item.shape[1] == prompt.shape[1] for item in others):
            return None
        if mask is not None and tuple(mask.shape) != tuple(prompt.shape):
            return None

        def longer(length: int) -> dict[str, Any]:
            missing = (len(prompt), length - prompt.shape[1])
            changes = {"inputs": torch.cat([prompt, prompt.new_full(missing, token)], 1)}
            if mask is not None:
                changes["attention_mask"] = torch.cat([mask, mask.new_ones(missing)], 1)
            return {**named, **changes}

    def rehearse(length: int, tokens: int) -> None:
        generate(network, **{**longer(length), "max_new_tokens": tokens})

    return rehearse


def prompt_of(args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the prompt of a call of `generate`."""
    return args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))


def _all_known(criteria: Any) -> bool:
    return all(type(item).__name__ in _CRITERIA for item in criteria)
