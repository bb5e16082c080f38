"""Texts of adapters and of quantised weights, such as 'lora(r=16)' and 'nf4_dq', in one canonical form."""

import ast
from collections.abc import Callable, Mapping
from typing import Any

from vramcast.errors import UserError, check_amount, check_count, check_fraction, suggestion

_SYNONYMS: Mapping[str, str] = {
    "targets": "target_modules",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "rank": "r",
    "tokens": "num_virtual_tokens",
}
"""Short names for arguments of peft's configurations."""
_LISTS = frozenset({"target_modules", "modules_to_save", "feedforward_modules"})
QUANTIZED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("nf4", "nf4_dq", "fp4", "fp4_dq"), frozenset({"blocksize", "upcast"})),
    "int8": frozenset({"upcast"}),
    "gptq": frozenset({"bits", "group_size"}),
    "awq": frozenset({"group_size"}),
    "torchao_int8": frozenset(),
}
"""The forms of quantised weights, with their arguments."""
Call = tuple[str, Mapping[str, Any]]


def parse_pairs(text: str) -> dict[str, Any]:
    """Parse 'r=16,targets=q_proj,v_proj': a part without '=' belongs to the value before it."""
    parts: list[list[str]] = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        if "=" in part:
            parts.append(part.split("=", 1))
        elif parts:
            parts[-1].append(part)
        else:
            raise UserError(
                f"expected arguments such as r=16,targets=q_proj,v_proj, found {text!r}: write it like that"
            )
    names = [name.strip() for name, *_ in parts]
    if len(set(names)) < len(names):
        raise UserError(f"expected each argument once, found {names} in {text!r}: drop one of them")
    return {name: _value(values) for name, (_, *values) in zip(names, parts, strict=True)}


def _value(texts: list[str]) -> Any:
    values = [_literal(item.strip()) for item in texts]
    return values[0] if len(values) == 1 else values


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: too deeply nested
        return text


def adapter_call(text: str, parse: Callable[[str], Call]) -> Call:
    """Return name and arguments of an adapter: 'lora', 'lora(r=16)' or 'lora:r=16,targets=q_proj,v_proj'."""
    colon, bracket = text.find(":"), text.find("(")
    if bracket >= 0 and not 0 <= colon < bracket:
        name, arguments = parse(text[:bracket].strip().replace("-", "_") + text[bracket:])
    else:
        name, _, pairs = text.partition(":")
        name, arguments = name.strip().lower().replace("-", "_"), parse_pairs(pairs)
    if not name.isidentifier():
        raise UserError(f"expected an adapter such as lora or 'lora:r=16', found {text!r}: write it like that")
    full_names = {_SYNONYMS.get(key, key): value for key, value in arguments.items()}
    if len(full_names) < len(arguments):
        raise UserError(f"expected each argument of {name} once, found {sorted(arguments)}: drop one of them")
    _check_numbers(full_names)
    for key in _LISTS & full_names.keys():
        value = full_names[key]
        # peft reads a text as a pattern of whole names, which a bare name of a layer is not meant to be
        names = [value] if isinstance(value, str) and value.isidentifier() else value
        full_names[key] = sorted(names) if isinstance(names, list | tuple) else names
    return name.lower(), full_names


def _check_numbers(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments of LoRA that peft would reject with an error of its own arithmetic."""
    if "r" in arguments:
        check_count("the rank r of an adapter", arguments["r"])
    if "lora_alpha" in arguments:
        check_amount("lora_alpha", arguments["lora_alpha"], zero=False)
    if "lora_dropout" in arguments:
        check_fraction("lora_dropout", arguments["lora_dropout"])


def quantization_call(text: str, parse: Callable[[str], Call]) -> Call:
    """Return name and arguments of quantised weights: 'nf4', 'nf4-dq' or 'gptq(group_size=64)'."""
    name, bracket, rest = text.strip().partition("(")
    name = name.lower().replace("-", "_")
    if name not in QUANTIZED:
        if name in ("torchao_int4", "int4"):
            raise UserError(
                f"expected quantised weights that a gradient can pass, found {text!r}: the int4 kernel of torchao has "
                "no backward pass, and peft refuses it; name nf4 or torchao_int8"
            )
        hint = suggestion(name, QUANTIZED, "name one of them")
        raise UserError(f"expected quantised weights in one of {sorted(QUANTIZED)}, found {text!r}: {hint}")
    arguments = parse(name + bracket + rest)[1]
    unknown = sorted(arguments.keys() - QUANTIZED[name])
    if unknown:
        raise UserError(f"expected arguments of {name} among {sorted(QUANTIZED[name])}, found {unknown}: remove them")
    return name, arguments
