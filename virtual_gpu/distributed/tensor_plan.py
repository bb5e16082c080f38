"""Tensor parallelism: which linear layers are split by columns and by rows, and DTensor's code that does it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vramcast.errors import UserError

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv", "w1", "w3", "fc1", "linear1")
_ROWS = ("o_proj", "down_proj", "wo", "w2", "fc2", "linear2", "out_proj")
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_heads", "n_kv_heads", "num_heads")
_STYLES: Mapping[str, Any] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def apply_tensor_plan(network: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a network over a mesh; raise UserError if there is nothing to split, or no even split."""
    degree = mesh.size()
    plan = tensor_plan(network)
    if not plan:
        raise UserError(
            f"expected a network with a tensor-parallel plan (base_model_tp_plan, or linear layers named like q_proj "
            f"and o_proj), found {type(network).__name__} without one: use fsdp2"
        )
    _check_heads(network, degree)
    for name, style in plan.items():
        layer: Any = network.get_submodule(name)
        size = layer.out_features if style == "colwise" else layer.in_features
        if size % degree:
            raise UserError(
                f"expected a tensor-parallel degree that divides the {size} features of {name}, found {degree}: "
                "change it"
            )
        parallelize_module(layer, mesh, _STYLES[style]())


def tensor_plan(network: nn.Module) -> dict[str, str]:
    """Return the style of each layer to split, by name: the plan of transformers, else by the usual names.

    Entries of transformers' plan with other styles (replicated norms, sequence parallelism) split no layer and are
    left out.
    """
    plan = _library_plan(network)
    if plan:
        return plan
    styles = {**dict.fromkeys(_COLUMNS, "colwise"), **dict.fromkeys(_ROWS, "rowwise")}
    return {
        name: styles[name.rpartition(".")[2]]
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in styles
    }


def _library_plan(network: nn.Module) -> dict[str, str]:
    for prefix, module in network.named_modules():
        config = getattr(module, "config", None)
        patterns = getattr(config, "base_model_tp_plan", None)
        if patterns and any(True for _ in _matches(module, patterns)):
            start = f"{prefix}." if prefix else ""
            return {start + name: style for name, style in _matches(module, patterns)}
    return {}


def _matches(module: nn.Module, patterns: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    compiled = [(re.compile(key.replace(".", r"\.").replace("*", r"\d+") + "$"), patterns[key]) for key in patterns]
    for name, layer in module.named_modules():
        for pattern, style in compiled:
            if isinstance(layer, nn.Linear) and style in _STYLES and pattern.match(name):
                yield name, style


def _check_heads(network: nn.Module, degree: int) -> None:
    configs = [getattr(module, "config", None) for module in network.modules()]
    for owner in (*filter(None, configs), *network.modules()):
        for name in _HEADS:
            heads = getattr(owner, name, None)
            if isinstance(heads, int) and heads % degree:
                raise UserError(
                    f"expected a tensor-parallel degree that divides the {heads} heads ({name}), found {degree}: "
                    "change the world size or the tensor degree"
                )
