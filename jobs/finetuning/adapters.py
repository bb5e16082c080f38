"""Adapters of peft on a network of the meta device, by running peft itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from vramcast.device.profiles import load_profile
from vramcast.errors import UserError, suggestion
from vramcast.jobs.families.libraries import tolerate_broken_torchvision
from vramcast.jobs.families.meta_device import to_meta
from vramcast.virtual_gpu.training.setup import parse_call

_TYPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dora": ("LORA", {"use_dora": True}),
    "rslora": ("LORA", {"use_rslora": True}),
    "prompt": ("PROMPT_TUNING", {}),
    "prefix": ("PREFIX_TUNING", {}),
}
"""Names that people use beside those of `peft.PeftType`."""
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ADALORA": {"total_step": 1000},
    "PROMPT_TUNING": {"num_virtual_tokens": 20},
    "PREFIX_TUNING": {"num_virtual_tokens": 20},
    "P_TUNING": {"num_virtual_tokens": 20, "encoder_hidden_size": 128},
}
"""Arguments that a type cannot do without."""
_READ_WEIGHTS = {"ADAMSS", "SHIRA"}
"""Types that read the values of weights when they are made."""


def peft_library() -> ModuleType:
    """Import peft, or raise a `UserError` that names the extra to install."""
    tolerate_broken_torchvision()
    try:
        return import_module("peft")
    except ImportError as error:
        raise UserError(
            f"expected the library peft, which makes the adapters, to be installed, found: {error}; "
            "pip install 'vramcast[finetuning]', or name an interpreter that has it by --python"
        ) from error


def add_adapter(peft: Any, module: nn.Module, text: str) -> nn.Module:
    """Return the network inside a `PeftModel`: its parameters are frozen, those of the adapter are trained."""
    name, arguments = parse_call(text)
    kind, implied = _TYPES.get(name, (name.upper(), {}))
    configs = _configurations(peft)
    if kind not in configs:
        choices = sorted([*_TYPES, *(item.lower() for item in configs)])
        hint = suggestion(name, choices, "name one of them")
        raise UserError(f"expected an adapter of {choices}, found {name!r}: {hint}")
    values = {"task_type": _task(module), **_DEFAULTS.get(kind, {}), **implied, **arguments}
    cast = bool(values.pop("autocast_adapter_dtype", True))
    try:
        config = configs[kind](**values)
        # made on the CPU: peft gives adapters that are on meta already neither the dtype of their base nor their own
        with host_weights(module) if kind in _READ_WEIGHTS else nullcontext():
            adapted: nn.Module = peft.get_peft_model(module, config, autocast_adapter_dtype=cast)
    except Exception as error:  # types of peft check their arguments in many ways, and some read weights
        reason = " ".join(str(error).split())
        raise UserError(
            f"expected an adapter that peft {peft.__version__} can add to {type(module).__name__}, found {text}: "
            f"{reason[:300]}; change it"
        ) from error
    return to_meta(adapted)


@contextmanager
def host_weights(module: nn.Module) -> Iterator[None]:
    """Let the weights of a meta network pass for host tensors, whose values read as noise."""
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation  # noqa: PLC0415 - few adapters need it

    with CudaEmulation(load_profile("a100_40gb"), unbounded=True) as gpu:
        for weight in (*module.parameters(), *module.buffers()):
            gpu.tracer.adopt_hollow(weight)
        yield


def _configurations(peft: Any) -> dict[str, Any]:
    """Return the configuration class of each adapter type that this release of peft has."""
    mapping = import_module("peft.mapping")
    classes = getattr(mapping, "PEFT_TYPE_TO_CONFIG_MAPPING", {})
    return {str(getattr(kind, "value", kind)).upper(): value for kind, value in classes.items()}


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether a network is a class of transformers."""
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__)


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a whole network of transformers, and not the wrapper of an adapter around one."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def _task(module: nn.Module) -> str | None:
    name = type(module).__name__
    return next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)
