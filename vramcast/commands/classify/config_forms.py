"""Checkpointing and Liger's kernels in configuration files of other tools, as training options."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vramcast.errors import UserError
from vramcast.virtual_gpu.training.checkpointing_forms import CheckpointingForm, checkpointing_form
from vramcast.virtual_gpu.training.loss_forms import KERNELS, changed_kernels

_LIGER_PLUGIN = "liger"
_AXOLOTL_KERNELS = {
    "liger_rope": "rope",
    "liger_rms_norm": "rms_norm",
    "liger_glu_activation": "glu",
    "liger_cross_entropy": "cross_entropy",
    "liger_fused_linear_cross_entropy": "fused_linear_cross_entropy",
}
"""Keys of axolotl's plug-in and names of kernels; norms of other kinds are not in the networks that it patches."""
_TRUTH_VALUES = {
    **dict.fromkeys(("true", "yes", "on", "y", "t", "1"), True),
    **dict.fromkeys(("false", "no", "off", "n", "f", "0"), False),
}
DIGITS = re.compile("[0-9]{1,18}")
"""Of a number in quotes."""
_ON_SEVERAL = {
    "checkpointing": "offloaded checkpoints of several GPUs are simulated on the device: they take less memory",
    "liger": "Liger's fused kernels are not simulated for several GPUs: logits take less memory with them",
}


def trainer_checkpointing(config: Mapping[str, Any]) -> bool | str:
    """Return the form that TrainingArguments name; `activation_` is the newer prefix of both keys.

    The older key counts where the newer one is absent or null (transformers/training_args.py, __post_init__).
    """
    enabled, options = (
        next((config[key] for key in _newest_first(end) if config.get(key) is not None), None)
        for end in ("", "_kwargs")
    )
    return _form(options, offload=bool(config.get("activation_offloading"))) if enabled else False


def _newest_first(end: str) -> tuple[str, str]:
    return f"activation_checkpointing{end}", f"gradient_checkpointing{end}"


def factory_checkpointing(config: Mapping[str, Any]) -> bool | str:
    """Return the form of LLaMA-Factory, which recomputes by default, and by default in the reentrant form."""
    if config.get("disable_gradient_checkpointing"):
        return False
    offload = bool(config.get("use_unsloth_gc"))
    return CheckpointingForm(reentrant=offload or bool(config.get("use_reentrant_gc", True)), offload=offload).text()


def axolotl_checkpointing(config: Mapping[str, Any]) -> bool | str:
    """Return the form of axolotl, which writes offloading into the switch or beside it."""
    enabled = config.get("gradient_checkpointing")
    if isinstance(enabled, str):  # pydantic reads truth values in quotes
        enabled = _TRUTH_VALUES.get(enabled.lower(), enabled)
    offload = isinstance(enabled, str) or bool(config.get("activation_offloading"))
    return _form(config.get("gradient_checkpointing_kwargs"), offload=offload) if enabled else False


def _form(options: Any, *, offload: bool) -> bool | str:
    options = _parsed(options)
    every = options.get("every_n_layers")
    return CheckpointingForm(
        every_n_layers=every if isinstance(every, int) and every > 0 else 1,
        reentrant=bool(options.get("use_reentrant")),
        offload=offload or bool(options.get("offload")),
    ).text()


def _parsed(options: Any) -> Mapping[str, Any]:
    """Return a mapping of options, which the Trainer also reads from JSON in a text."""
    if not isinstance(options, str) or not options.startswith("{"):
        return options if isinstance(options, Mapping) else {}
    try:
        values: dict[str, Any] = json.loads(options)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"expected options of checkpointing as JSON, found {options!r}: {error}; write it like "
            "'{\"use_reentrant\": false}'"
        ) from error
    return {key: _plain(value) if isinstance(value, str) else value for key, value in values.items()}


def _plain(text: str) -> Any:
    """Return a value that a text stands for (transformers/training_args.py, _convert_str_dict)."""
    return int(text) if DIGITS.fullmatch(text) else _TRUTH_VALUES.get(text.lower(), text)


def offloading_notes(config: Mapping[str, Any], checkpointing: Any) -> list[str]:
    """Return a note if activations are offloaded without checkpointing."""
    if config.get("activation_offloading") and not checkpointing:
        return ["activation_offloading without checkpointing is not simulated: it takes less memory"]
    return []


def liger_of(config: Mapping[str, Any]) -> bool | str:
    """Return Liger's kernels that a configuration names: of the Trainer, of LLaMA-Factory or of axolotl's plug-in.

    The Trainer passes its mapping as arguments to Liger's function, so that absent keys keep Liger's defaults and
    unknown ones are ignored (transformers/integrations/liger.py).
    """
    if config.get("use_liger_kernel"):
        named = config.get("liger_kernel_config")
        switches = named if isinstance(named, Mapping) else {}
        return changed_kernels({name: bool(switches[name]) for name in KERNELS if name in switches})
    if config.get("enable_liger_kernel"):
        return True
    if not any(_LIGER_PLUGIN in str(item).lower() for item in plugins(config)):
        return False
    return _names([name for key, name in _AXOLOTL_KERNELS.items() if config.get(key)])


def _names(names: list[str]) -> bool | str:
    return ",".join(sorted(map(str, names))) or False


def plugins(config: Mapping[str, Any]) -> list[Any]:
    """Return the plug-ins of a configuration of axolotl."""
    named = config.get("plugins")
    return named if isinstance(named, list) else [named] if named else []


def has_other_plugins(config: Mapping[str, Any]) -> bool:
    """Return whether axolotl has a plug-in that is not simulated."""
    return any(_LIGER_PLUGIN not in str(item).lower() for item in plugins(config))


def without_device_pairs(values: dict[str, Any]) -> list[str]:
    """Take back what several GPUs cannot be simulated with, in place; return notes about it."""
    notes = []
    form = checkpointing_form(values.get("checkpointing") or False)
    if form is not None and form.offload:
        values["checkpointing"] = replace(form, offload=False).text()
        notes.append(_ON_SEVERAL["checkpointing"])
    if values.pop("liger", False):
        notes.append(_ON_SEVERAL["liger"])
    return notes
