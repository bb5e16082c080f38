"""Rows of fms-acceleration: trl's SFTTrainer under FSDP1 as accelerate sets it up.

A row is simulated with the release of transformers that it was measured with: up to 4.45 a checkpoint surrounds each
FSDP unit, later the unit surrounds the checkpoint. With a frozen base FSDP holds a hook on the input of each unit until
the end of the backward pass, and so the input of each reentrant checkpoint and its gradient.
"""

import re

import torch
from torch import nn

from benchmarks.field.ranks.cases import Case, Record
from benchmarks.field.ranks.flash_attention import use_flash_attention
from benchmarks.field.ranks.lora import add_lora
from benchmarks.field.ranks.losses import LanguageLoss
from vramcast.dataset_builder.families.libraries import import_library
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.training_setup import TrainingSetup

_KERNELS = ("foak", "liger", "autogptq", "bnb", "fast-kernels", "moe")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_POWERLM = {
    "vocab_size": 49152,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 40,
    "num_attention_heads": 36,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_SANTACODER = {"vocab_size": 49280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192}
_NETWORKS = {
    "mistralai/Mistral-7B-v0.1": ("Mistral", {"num_key_value_heads": 8}, "MistralDecoderLayer"),
    "ibm/PowerLM-3b": ("Granite", _POWERLM, "GraniteDecoderLayer"),
    "bigcode/gpt_bigcode-santacoder": ("GPTBigCode", _SANTACODER, "GPTBigCodeBlock"),
}


def fms_case(record: Record) -> Case | str:
    """Return the case of a row of fms-acceleration, or the reason why it is left out."""
    if int(record["n_gpus"]) < 2:
        return "one GPU"
    if not record["metric"].startswith("allocated") or record["outcome"] != "ok":
        return "measured by nvidia-smi, or failed"
    if record["model"].startswith("mistralai/Mixtral"):
        return "routing of experts depends on the data"
    text = (record["peft"] + record["task"] + record["notes"] + record["optimizer"] + record["attention"]).lower()
    if any(word in text for word in _KERNELS):
        return "kernels of a plug-in, or a quantised base"
    if record["model"] not in _NETWORKS:
        return "another network"
    versions = record["framework_versions"]
    if _generation(_release(versions, "transformers")) != _generation(_installed()):
        return f"another generation of transformers: {_generation(_release(versions, 'transformers'))}"
    return _case(record)


def _case(record: Record) -> Case:
    size, batch = int(record["n_gpus"]), int(record["micro_batch"])
    mixed = re.search("autocast=true", record["dtype"], re.IGNORECASE) is not None
    lora = re.search(r"r=([\d.]+).*dropout=([\d.]+)", record["peft"])
    adapter = torch.float32 if _release(record["framework_versions"], "peft") >= (0, 12) else torch.bfloat16
    dropout = float(lora[2]) if lora else 0.0
    family, configuration, layer = _NETWORKS[record["model"]]
    packed, length = "packed=[True]" in record["seq_len"], _length(record, family)

    def make() -> nn.Module:
        transformers = import_library("transformers")
        config = getattr(transformers, f"{family}Config")(**configuration, use_cache=False)
        network = getattr(transformers, f"{family}ForCausalLM")(config)
        network.to(torch.float32 if mixed and not lora else torch.bfloat16)
        use_flash_attention(network)
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        network.enable_input_require_grads()
        if lora:
            add_lora(network, _PROJECTIONS, int(float(lora[1])), dropout, adapter)
        return LanguageLoss(network, own=True)

    name = f"{record['model'].split('/')[1]} {'LoRA' if lora else 'full'}, {size} GPUs, batch {batch}"
    return Case(
        name + (", mixed" if mixed else "") + ("" if packed else ", mean length"),
        "allocated",
        float(record["value_gib"]),
        "a100_80gb",
        make,
        length,
        TrainingSetup(
            batch_size=batch,
            dtype="fp32" if mixed and not lora else "bf16",
            autocast="bf16" if mixed else None,
            loss="own",
            optimizer="AdamW",
            accumulate=1 if packed else 2,
        ),
        Parallelism(strategy="fsdp1", world_size=size, wrap=f"{layer},Adapter" if lora else layer),
        (family, size, batch, mixed, bool(lora), dropout, adapter, length, packed),
    )


def _length(record: Record, family: str) -> int:
    """Return the tokens of a sample. Unpacked rows publish their mean alone, divided by the number of ranks."""
    if "packed=[True]" in record["seq_len"]:
        return 2048 if family == "GPTBigCode" else 4096
    logged = re.search(r"sample=(\d+)", record["seq_len"])
    return int(logged[1]) * int(record["n_gpus"]) if logged else 4096


def _release(versions: str, library: str) -> tuple[int, int]:
    """Return the release of a library in a row; rows that state none, or a commit, get that of their date."""
    stated = re.search(rf"{library}==(\d+)\.(\d+)", versions)
    if stated:
        return int(stated[1]), int(stated[2])
    early = "date 2024-05" in versions or "date 2024-06" in versions
    return {"transformers": (4, 39 if early else 45), "peft": (0, 11 if early else 13)}[library]


def _installed() -> tuple[int, int]:
    words = import_library("transformers").__version__.split(".")
    return int(words[0]), int(words[1])


def _generation(release: tuple[int, int]) -> str:
    """Return the releases of transformers that train alike."""
    if release < (4, 42):
        return "4.39 to 4.41"
    if release < (4, 46):
        return "4.42 to 4.45"
    return "4.46 to 4.48" if release < (4, 49) else "4.49 or later"
