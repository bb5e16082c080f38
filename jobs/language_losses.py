"""Forms of the loss of a language model that torch's own operators compute."""

import importlib
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader knows

from vramcast.errors import UserError
from vramcast.jobs.families.keyword_inputs import KeywordInputs
from vramcast.jobs.finetuning.adapters import is_pretrained
from vramcast.virtual_gpu.training.loss_forms import chunks_of

_IGNORED = -100
_FACTORS = ("logit_scale", "lm_head_multiplier")
"""Names of a factor of logits in configs of transformers; `logits_scaling` divides, and in HyperCLOVA X it multiplies,
which takes the same memory."""


def use_loss_form(module: nn.Module, form: str) -> None:
    """Let a language model of transformers compute its loss in another form; the module is changed in place."""
    if form == "default":
        return
    network = causal_network(module)
    if network is None:
        inner = module.subject if isinstance(module, KeywordInputs) else module
        raise UserError(
            f"expected a causal language model of transformers beside loss_form={form}, found "
            f"{type(inner).__name__}: leave it out, or write the loss in a --step of your file"
        )
    network.forward = partial(_forward, network, inspect.signature(network.forward), form)


def causal_network(module: nn.Module) -> Any:
    """Return the causal language model of transformers in a module, None if there is none."""
    parts = (part for part in module.modules() if type(part).__name__.endswith("ForCausalLM"))
    return next((part for part in parts if is_pretrained(part) and _head(part) is not None), None)


def _head(network: Any) -> Any:
    return network.get_output_embeddings()


def _hidden(network: Any, inputs: dict[str, Any]) -> Tensor:
    """Run all but the output layer."""
    hidden: Tensor = network.base_model(**inputs)[0]
    return hidden


def _logits(network: Any, hidden: Tensor) -> Tensor:
    """Run the output layer, with the scale that Granite, Cohere and Falcon-H1 have, and the bound that Gemma has."""
    config = network.config
    logits: Tensor = _head(network)(hidden)
    for name in _FACTORS:
        factor = getattr(config, name, None)
        if factor is not None:
            logits = logits * factor
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        logits = logits / divisor
    bound = getattr(config, "final_logit_softcapping", None)
    return logits if bound is None else (logits / bound).tanh() * bound


def _shifted(labels: Tensor) -> Tensor:
    """Return the next token of each position, none for the last (transformers, loss_utils.ForCausalLMLoss)."""
    return F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


def _forward(network: Any, signature: inspect.Signature, form: str, /, *args: Any, **kwargs: Any) -> Any:
    """Take the arguments of the network's own forward, and return its kind of output."""
    inputs = _by_name(signature, args, kwargs)
    labels = inputs.pop("labels", None)
    if labels is None:
        raise UserError(
            f"expected labels in each call of {type(network).__name__} beside loss_form={form}, found none: pass them, "
            "or leave out the loss form and write the loss in a --step of your file"
        )
    inputs.pop("logits_to_keep", None)  # all logits count with labels
    chunks, hidden = chunks_of(form), _hidden(network, inputs)
    loss, logits = (
        _loss_of_whole(network, hidden, labels) if chunks is None else _loss_of_chunks(network, hidden, labels, chunks)
    )
    output = importlib.import_module("transformers.modeling_outputs").CausalLMOutput(loss=loss, logits=logits)
    return output.to_tuple() if inputs.get("return_dict") is False else output


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, without those that are None."""
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return {name: value for name, value in bound.items() if value is not None}


def _loss_of_whole(network: Any, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    """Return the mean cross entropy of logits that are cast to fp32 at once, and the logits."""
    logits = _logits(network, hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), _shifted(labels).flatten()), logits


def _loss_of_chunks(network: Any, hidden: Tensor, labels: Tensor, chunks: int) -> tuple[Tensor, Any]:
    """Return the mean cross entropy of logits in chunks of the sequence, of which one at a time is cast to fp32.

    This is torchtune's CEWithChunkedOutputLoss with the output layer of its TransformerDecoder: the logits of all
    chunks exist before the first one is cast.
    """
    outputs = [_logits(network, part) for part in hidden.chunk(chunks, dim=1)]
    targets = _shifted(labels)
    total = sum(
        F.cross_entropy(logits.flatten(0, 1).float(), part.flatten(), reduction="sum")
        for logits, part in zip(outputs, targets.chunk(chunks, dim=1), strict=True)
    )
    return total / (targets != _IGNORED).sum(), outputs
