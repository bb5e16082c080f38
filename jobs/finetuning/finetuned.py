"""Fine-tuning: a frozen base, quantised or not, with an adapter, made in the order in which scripts make it."""

from typing import Any

from torch import nn

from vramcast.jobs.families.keyword_inputs import KeywordInputs
from vramcast.jobs.finetuning.adapters import add_adapter, is_of_transformers, peft_library
from vramcast.jobs.finetuning.quantization import quantize_linears
from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call


def with_finetuning(module: nn.Module, training: TrainingSetup) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the network with the adapter and the quantised weights of a setup, and facts that an answer must state.

    The network is on the meta device, in the dtype of the setup, with checkpointing enabled, and is changed in place.
    """
    if training.adapter is None and training.quantize is None:
        return module, ()
    if isinstance(module, KeywordInputs):  # the library's network is inside
        module.subject, facts = with_finetuning(module.subject, training)
        return module, facts
    facts = ()
    if training.quantize is not None:
        name, arguments = parse_call(training.quantize)
        facts = quantize_linears(module, name, arguments, training.autocast or training.dtype)
        if training.is_training and arguments.get("upcast", True) and is_of_transformers(module):
            _prepare(peft_library(), module, name)
    if training.adapter is None:
        return module, facts
    peft = peft_library()
    return add_adapter(peft, module, training.adapter).train(), facts


def _prepare(peft: Any, module: Any, name: str) -> None:
    """Cast the parameters that stay in 16 bits to fp32, as peft's recipe for quantised bases of bitsandbytes does."""
    module.is_loaded_in_4bit, module.is_loaded_in_8bit = name.startswith(("nf4", "fp4")), name == "int8"
    if not (module.is_loaded_in_4bit or module.is_loaded_in_8bit):
        module.quantization_method = name.partition("_")[0]
    if name != "awq":  # peft has no recipe for it
        peft.prepare_model_for_kbit_training(module, use_gradient_checkpointing=False)
