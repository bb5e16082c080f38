"""Runs of a network without training: a forward pass, a loss, or the library's `generate`."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from vramcast.errors import UserError
from vramcast.jobs.batches import call
from vramcast.jobs.families.keyword_inputs import KeywordInputs
from vramcast.jobs.steps import LossCall, TrainingStep, trainer_step
from vramcast.virtual_gpu.training.setup import TrainingSetup

FACT = "nothing is trained: no measured run of {mode} calibrates the margin, which is wider than that of training"
WHOLE_PROMPTS = "each sequence has the whole prompt, and generation runs to all of its new tokens"


def inference_call(module: nn.Module, training: TrainingSetup, step: TrainingStep | None) -> Callable[[Any], Any]:
    """Return what runs a batch in the mode of a setup."""
    if training.mode == "evaluation":
        holding = (
            None if step is trainer_step else step
        )  # unlike its training step, the Trainer's evaluation keeps logits
        return LossCall(module, holding)
    if training.mode == "inference":
        return ForwardCall(module)
    return _generation(module, training)


def inference_facts(training: TrainingSetup) -> tuple[str, ...]:
    """Return the statements of an answer about a run without training."""
    if training.is_training:
        return ()
    return (FACT.format(mode=training.mode), *((WHOLE_PROMPTS,) if training.mode == "generate" else ()))


class ForwardCall(nn.Module):
    """A network that takes a batch as one argument and sees no labels where its inputs have names."""

    def __init__(self, subject: nn.Module) -> None:
        super().__init__()
        self.subject = subject

    def forward(self, batch: Any) -> Any:
        """Return the output."""
        network, inputs = _without_labels(self.subject, batch)
        return call(network, inputs)


def _without_labels(module: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Return the library's network and its inputs by name where they are named, and leave labels out."""
    if isinstance(module, KeywordInputs):
        named = module.named(batch)
        return module.subject, {name: value for name, value in named.items() if name != "labels"}
    if isinstance(batch, Mapping):
        return module, {name: value for name, value in batch.items() if name != "labels"}
    return module, batch


def _generation(module: nn.Module, training: TrainingSetup) -> Callable[[Any], Any]:
    """Return a call of the library's `generate`, which runs to its last token."""
    network: Any = module.subject if isinstance(module, KeywordInputs) else module
    config = getattr(network, "generation_config", None)
    if not callable(getattr(network, "generate", None)) or config is None:
        raise UserError(
            f"expected a network with the generate method of transformers beside mode=generate, found "
            f"{type(network).__name__}: name one such as hf:gpt2, or take mode=inference"
        )
    settings = _settings(config, training)

    def generate(batch: Any) -> Any:
        inputs = _without_labels(module, batch)[1]
        arguments = inputs if isinstance(inputs, Mapping) else {"inputs": _prompt(inputs)}
        return network.generate(**arguments, generation_config=settings)

    return generate


def _settings(config: Any, training: TrainingSetup) -> Any:
    """Return a generation configuration that no end token stops; the network's own one, which fills gaps, neither."""
    config.eos_token_id = None
    config.pad_token_id = 0 if config.pad_token_id is None else config.pad_token_id
    settings = deepcopy(config)
    settings.max_length = None
    settings.max_new_tokens = settings.min_new_tokens = training.new_tokens
    settings.cache_implementation = training.cache or settings.cache_implementation
    settings.disable_compile = True
    return settings


def _prompt(inputs: Any) -> Tensor:
    first: Any = inputs[0] if isinstance(inputs, tuple | list) else inputs
    return first  # type: ignore[no-any-return]
