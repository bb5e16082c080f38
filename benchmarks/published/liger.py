"""Liger-Kernel's benchmarks: single operators in torch's, transformers' and its own form, allocated memory.

Until release 0.7 each benchmark had its own loop; from 0.8 on all of them share one, which makes the gradient of the
output inside of the measured step.
"""

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from benchmarks.published.job import PublishedJob, Record
from vramcast.virtual_gpu.allocator.sizes import MIB

_DEVICES = {
    "NVIDIA A100-SXM4-80GB": "a100_80gb",
    "NVIDIA H100 PCIe": "h100_80gb",
    "NVIDIA H100 80GB HBM3": "h100_80gb",
    "NVIDIA GeForce RTX 3090": "rtx_3090",
    "NVIDIA GeForce RTX 4090": "rtx_4090",
    "NVIDIA B200": "b200",
}
_VOCABULARIES = {
    "llama_2_7b": 32000,
    "llama_3_8b": 128256,
    "qwen2.5_7b": 152064,
    "qwen2.5_14b": 152064,
    "qwen2.5_72b": 152064,
    "deepseek_v2_lite": 102400,
    "deepseek_v3": 129280,
}
_LOSSES = {"cross_entropy", "kl_div", "jsd", "tvd"}
_MLPS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "tiled_swiglu": "silu", "tiled_geglu": "gelu_pytorch_tanh"}
_ROPES = {"rope", "llama4_rope"}
_ROWS = {"layer_norm", "rms_norm", "softmax", "fused_add_rms_norm"}
_OWN = {"cross_entropy", "kl_div", "layer_norm", "group_norm", "softmax", "swiglu", "geglu", "rope"}
"""Operators whose Triton kernels were measured, all with release 0.8."""
_MEGATRON = {"megatron_rms_norm", "megatron_swiglu"}
_DEFECTS = {
    "embedding": "known defect: 12 GB of other allocations are included",
    "relu_squared": "known defect: GiB under the label MiB",
}


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    name, provider = re.fullmatch(r"(\w+) \[(.+)\]", record["model"]).groups()  # type: ignore[union-attr]
    own = provider == "liger_triton" and name in _OWN
    if not own and provider not in ("torch", "huggingface"):
        return "torch.compile" if provider == "torch_compile" else f"kernels of {re.split('[_-]', provider)[0]}"
    gpu = record["gpu"]
    if name in _DEFECTS:
        return _DEFECTS[name]
    if name == "softmax" and "3090" in gpu:
        return "known defect: GiB under the label MiB"
    mode, _, sweep = record["task"].partition(" ")
    release = tuple(int(word) for word in re.findall(r"liger (\d+)\.(\d+)", record["framework_versions"])[0])
    stepped = _configuration(name, sweep, json.loads(record["notes"]), shared_loop=release >= (0, 8))
    if stepped is None:
        return f"operator that is not rebuilt: {name}"
    operator, gradient, config = stepped
    if name == "group_norm" and release < (0, 8):
        mode = "full"  # this benchmark measured a full step in every mode: the published figures are equal
    return PublishedJob(
        group="Liger's operators" if own else "operators",
        title=f"{name} {record['task']} [{provider}] on {gpu}, {config.get('dtype', 'torch.float32')}",
        script="liger_operators" if own else "operators",
        parameters={"operator": operator, "mode": mode, "gradient": gradient, "config": config},
        stack="liger-0.8" if own else None,
        device=_DEVICES[gpu],
        metric="allocated",
        published_bytes=float(record["value_published"]) * MIB,
    )


def _configuration(
    name: str, sweep: str, notes: dict[str, Any], shared_loop: bool
) -> tuple[str, str, dict[str, Any]] | None:
    """Return operator, gradient of the output and configuration, None for an operator that has no script."""
    axis, _, text = sweep.partition("=")
    values = {**notes, axis: _VOCABULARIES.get(text) or int(text)}
    for names, reader in _READERS:
        if name in names:
            operator, gradient, config = reader(name, values, shared_loop)
            return operator, gradient, {**config, **({"dtype": values["dtype"]} if "dtype" in values else {})}
    return None


_Read = tuple[str, str, dict[str, Any]]


def _loss(name: str, values: dict[str, Any], shared_loop: bool) -> _Read:
    vocabulary = values.get("vocab_size") or values.get("V") or values["model_config"]
    rows = values.get("BT") or values.get("B", values.get("bsz", 1)) * values.get("T", values.get("seq_len", 1))
    return name, "made" if shared_loop else "none", {"rows": rows, "vocabulary": vocabulary}


def _by_rows(name: str, values: dict[str, Any], shared_loop: bool) -> _Read:
    rows = values.get("BT") or values.get("T") or values["M"]
    sizes = {"rows": rows, "hidden_size": _width(values), "both": not shared_loop}
    return name, "made" if shared_loop else "kept", sizes


def _group_norm(name: str, values: dict[str, Any], shared_loop: bool) -> _Read:
    rows = values.get("M") or max(1, values["BT"] // values["H"])
    sizes = {"rows": rows, "hidden_size": values.get("C") or values["hidden_size"], "H": values["H"]}
    gradient = "made" if shared_loop else "kept"
    return name, gradient, {**sizes, "channels_per_group": values["channels_per_group"]}


def _mlp(name: str, values: dict[str, Any], shared_loop: bool) -> _Read:
    sizes = {key: values[key] for key in ("hidden_size", "intermediate_size")}
    batch = {"batch_size": values.get("bsz") or values["B"], "length": values["T"]}
    gradient = "made" if shared_loop or name.startswith("tiled") else "kept"
    return "mlp", gradient, {**sizes, **batch, "hidden_act": _MLPS[name]}


def _rope(name: str, values: dict[str, Any], shared_loop: bool) -> _Read:
    sizes = {
        "hidden_size": _width(values),
        "heads": values.get("num_q_heads") or values["num_attention_heads"],
        "kv_heads": values.get("num_kv_heads") or values["num_key_value_heads"],
        "length": values.get("T") or values["seq_len"],
        "both": not shared_loop,
    }
    return name, "made" if shared_loop else "none", sizes


def _linear_cross_entropy(name: str, values: dict[str, Any], shared_loop: bool) -> _Read:
    return name, "none", {"rows": values["BT"], "hidden_size": _width(values), "vocabulary": values["V"]}


def _megatron(name: str, values: dict[str, Any], shared_loop: bool) -> _Read:
    size = {"hidden_size": values["H"]} if "H" in values else {"intermediate_size": values["ffn_local"]}
    return name, "summed", {"rows": values["S"], "batch_size": values["B"], **size}


def _width(values: dict[str, Any]) -> int:
    return int(values.get("hidden_size") or values.get("H") or values["N"])


_READERS: tuple[tuple[Collection[str], Callable[[str, dict[str, Any], bool], _Read]], ...] = (
    (_LOSSES, _loss),
    (_ROWS, _by_rows),
    (_MLPS, _mlp),
    (_ROPES, _rope),
    (("group_norm",), _group_norm),
    (("fused_linear_cross_entropy",), _linear_cross_entropy),
    (_MEGATRON, _megatron),
)
