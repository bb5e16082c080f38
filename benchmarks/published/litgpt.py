"""litgpt on one GPU: its resource tables (A100-40GB) and the runs of its config hub (A10G), allocated memory."""

import re
from typing import Any

from benchmarks.published.job import PublishedJob, Record

_NETWORKS = {
    "phi-1.5 1.3B": "phi-1_5",
    "StableLM Alpha 3B": "stablelm-base-alpha-3b",
    "Llama 2 7B": "Llama-2-7b-hf",
    "Llama 2 13B": "Llama-2-13b-hf",
    "falcon-7b": "falcon-7b",
    "gemma-2b": "Gemma-2b",
    "gemma-7b": "Gemma-7b",
    "gemma-2-9b": "Gemma-2-9b",
    "llama-3-8b": "Llama-3-8B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "mistral-7b": "Mistral-7B-v0.1",
    "mistral-7b-v0.2": "Mistral-7B-v0.2",
    "phi-2": "phi-2",
    "Phi-3-mini-4k-instruct": "Phi-3-mini-4k-instruct",
    "stablelm-base-alpha-3b": "stablelm-base-alpha-3b",
    "tiny-llama": "tiny-llama-1.1b",
}
"""The names of litgpt's own configurations."""
_DEVICES = {"A100-SXM4-40GB": "a100_40gb", "A10G": "rtx_3090"}
"""An A10G has the compute capability and the memory of an RTX 3090."""
_PARTS = {"q": "query", "k": "key", "v": "value"}
_LAYERS = ("query", "key", "value", "projection", "mlp", "head")
_LATER, _BATCHES = 128, 4
_SHORT = f"batches after the longest of litgpt's resource tables have {_LATER} tokens; lengths are not published"
_CAPPED = "all batches of litgpt's config hub have its cap of tokens; lengths are not published"


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    if record["n_gpus"] != "1":
        return "more than one GPU"
    if record["outcome"] != "ok":
        return "ran out of memory, or not supported"
    if not record["dtype"].startswith("bf16-true"):
        return "the configuration of the run is not stated"
    if record["model"] not in _NETWORKS:
        return f"network that is not rebuilt: {record['model']}"
    hub = "config_hub" in record["source"]
    quantize = re.search(r"base=([\w.-]+)", record["peft"])
    parameters = {
        "network": _NETWORKS[record["model"]],
        **_method(record["peft"]),
        "quantize": quantize[1] if quantize else None,
        "keeps_inputs": quantize is not None,
        "batch_size": int(record["micro_batch"]),
        "first_generation": not hub,
        **_lengths(record["seq_len"], hub),
    }
    longest = max(parameters["lengths"])
    method = f"{parameters['method']}{' on ' + quantize[1] if quantize else ''}"
    return PublishedJob(
        group="litgpt config hub" if hub else "litgpt resource tables",
        title=f"{record['model']} {method}, batch {parameters['batch_size']} x {longest}",
        script="litgpt_finetune",
        parameters=parameters,
        stack="litgpt-0.4" if hub else "litgpt-0.2",
        device=_DEVICES[record["gpu"]],
        metric="allocated",
        published_bytes=float(record["value_published"].split()[0]) * 1e9,
        assumptions=(_CAPPED if hub else _SHORT,),
    )


def _method(text: str) -> dict[str, Any]:
    """Return the script of litgpt that a row was made with, and its options."""
    adapter = re.search(r"Adapter v(\d)", text)
    if adapter:
        return {"method": {"1": "adapter", "2": "adapter_v2"}[adapter[1]], "options": {}}
    match = re.search(r"LoRA r=(\d+) alpha=(\d+) dropout=([\d.]+) targets=([\w,]+)", text)
    if match is None:
        if text:
            raise ValueError(f"no rank and no targets in {text!r}")
        return {"method": "full", "options": {}}
    rank, alpha, dropout, targets = match.groups()
    wanted = {_PARTS.get(word, word) for word in targets.split(",")}
    options = {"lora_r": int(rank), "lora_alpha": int(alpha), "lora_dropout": float(dropout)}
    return {"method": "lora", "options": {**options, **{f"lora_{name}": name in wanted for name in _LAYERS}}}


def _lengths(text: str, hub: bool) -> dict[str, Any]:
    """Return the lengths of the batches, and the cap of the config hub."""
    number = re.search(r"\d+", text)
    if number is None:
        raise ValueError(f"no length in {text!r}")
    longest = int(number[0])
    return {"cap": longest if hub else None, "lengths": [longest, *[longest if hub else _LATER] * (_BATCHES - 1)]}
