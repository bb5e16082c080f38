"""fms-acceleration on one GPU: supervised fine-tuning with fms-hf-tuning's `sft_trainer` on an A100-80GB."""

import re
from typing import Any

from benchmarks.published.job import PublishedJob, Record
from benchmarks.published.networks import network
from vramcast.virtual_gpu.allocator.sizes import MIB

NETWORKS = {
    "mistralai/Mistral-7B-v0.1": ("mistral-7b", 32001),
    "TheBloke/Mistral-7B-v0.1-GPTQ": ("mistral-7b", 32001),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral-8x7b", 32001),
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": ("mixtral-8x7b", 32001),
    "NousResearch/Llama-2-70b-hf": ("llama-2-70b", 32001),
    "TheBloke/Llama-2-70B-GPTQ": ("llama-2-70b", 32001),
    "meta-llama/Meta-Llama-3-8B": ("llama-3-8b", 128258),
    "TechxGenus/Meta-Llama-3-8B-GPTQ": ("llama-3-8b", 128258),
    "bigcode/gpt_bigcode-santacoder": ("santacoder", 49158),
    "ibm/PowerLM-3b": ("powerlm-3b", 49152),
}
"""Configurations, and the size of the tokenizer with the special tokens that the script adds: it resizes embeddings."""
_MIXTURES = {"mixtral-8x7b": 1 / 8}
"""The share of an expert in the places of all choices, of which every token has two."""
_BALANCED = "every expert of a mixture gets equally many tokens"
_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
_FRAMEWORKS: dict[str, dict[str, Any]] = {
    "none": {"quantisation": None, "prepared": False},
    "baseline-peft-bnb": {"quantisation": _NF4, "prepared": False},
    "accelerated-peft-bnb": {"quantisation": _NF4, "prepared": True},
    "accelerated-peft-autogptq": {"quantisation": {"bits": 4, "group_size": 128}, "prepared": True},
}
_UNGROUPED = ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ", "TheBloke/Llama-2-70B-GPTQ")
"""Checkpoints whose main branch has one scale for a whole column, as their publisher describes them (from memory)."""
_LOST_AUTOCAST = "csv date 2024-10-01"
"""A table in which no row trains under autocast, not even those with a quantised base, as those of all others do. The
benchmark's reports leave out a column with one value (from memory), so here all rows are taken to train under it."""
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "None": "fp16"}
"""`None` is of the first runs, whose defaults had float16."""

FAILED = "the run failed: it reports no allocated memory"


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    if record["n_gpus"] != "1":
        return "more than one GPU"
    if has_failed(record):
        return FAILED
    framework = search(r"framework=(\S+)", record["task"])
    if framework not in _FRAMEWORKS:
        return f"plug-in with kernels of its own: {framework}"
    if record["model"] not in NETWORKS:
        return f"configuration is not public: {record['model']}"
    if "packed=[True]" not in record["seq_len"]:
        return "lengths of padded batches are not published"
    name, tokens = NETWORKS[record["model"]]
    length = 2048 if name == "santacoder" else 4096
    dtype, autocast = precision_of(record)
    batch_size = int(record["micro_batch"])
    lora = lora_of(record["peft"])
    parameters = {
        "network": network(name), "tokens": tokens, "batch_size": batch_size, "length": length, "dtype": dtype,
        "autocast": autocast, "accumulate": 1, "lora": lora, "ranks": 1,
        "keeps_inputs": release_of("bitsandbytes", record["framework_versions"]) < (0, 43, 2), **_FRAMEWORKS[framework],
    }  # fmt: skip
    if record["model"] in _UNGROUPED:
        parameters["quantisation"] = {**parameters["quantisation"], "group_size": None}
    gptq = framework == "accelerated-peft-autogptq"
    kind = "full" if lora is None else "GPTQ-LoRA" if gptq else "QLoRA" if parameters["quantisation"] else "LoRA"
    kind += " accelerated" if parameters["prepared"] and not gptq else ""
    return PublishedJob(
        group="GPTQ base" if gptq else "mixtures of experts" if name in _MIXTURES else "dense",
        title=f"{name} {kind}, batch {batch_size} x {length}, {dtype}{', autocast' if autocast else ''}",
        script="sft_trainer",
        parameters=parameters,
        nonzero_fraction=_MIXTURES.get(name, 1.0),
        assumptions=(_BALANCED,) if name in _MIXTURES else (),
        stack=stack_of(record["framework_versions"]),
        device="a100_80gb",
        metric="smi" if record["metric"].startswith("smi") else "allocated",
        published_bytes=float(record["value_gib"]) * 1024 * MIB,
    )


def has_failed(record: Record) -> bool:
    """Return whether a run reports no allocated memory: its smi figure is then the limit of the GPU, not a need."""
    return re.search(r"peak_alloc_B=[1-9]", record["notes"]) is None


def stack_of(versions: str) -> str:
    """Return the stack of the row's release; rows without one are older than the first that have one."""
    release = release_of("transformers", versions) or (4, 39)
    names = {(4, 43): "transformers-4.39", (4, 46): "transformers-4.45"}
    return next((name for limit, name in names.items() if release < limit), "transformers-4.48")


def release_of(library: str, versions: str) -> tuple[int, ...]:
    """Return the release of a library; the empty tuple, which is older than all others, where none is stated."""
    match = re.search(rf"{library}==([\d.]+)", versions)
    return tuple(int(word) for word in match[1].split(".") if word) if match else ()


def precision_of(record: Record) -> tuple[str, str | None]:
    """Return the dtype of the weights and that of autocast."""
    text = record["dtype"]
    dtype = _DTYPES[search(r"torch_dtype=(\w+)", text)]
    for name in ("bf16", "fp16"):
        if search(rf"{name}_autocast=(\w+)", text).lower() == "true":
            return dtype, name
    return dtype, dtype if _LOST_AUTOCAST in record["framework_versions"] else None


def lora_of(text: str) -> dict[str, Any] | None:
    """Return the options of the adapters that a text describes."""
    match = re.search(r"LoRA r=([\d.]+) alpha=([\d.]+) dropout=([\d.]+) targets=([^;]+)", text)
    if match is None:
        return None
    rank, alpha, dropout, targets = match.groups()
    return {
        "r": int(float(rank)), "lora_alpha": int(float(alpha)), "lora_dropout": float(dropout),
        "target_modules": targets.split(),
    }  # fmt: skip


def search(pattern: str, text: str) -> str:
    """Return the first group of a pattern; raise where the text lacks it."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern} in {text!r}")
    return match[1]
