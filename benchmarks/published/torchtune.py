"""torchtune's recipes on one GPU: a ladder of memory savers on Llama 3.2 3B, and its tutorial on QLoRA."""

from collections.abc import Mapping
from typing import Any

from benchmarks.published.job import PublishedJob, Record

STACK = "torchtune-0.4"
_COMPILED = "networks that were compiled are traced as eager code"
_LENGTHS = {"Llama 2 7B": 1304, "Llama 3.2 3B": 1044}
_LENGTH = "the longest batch of Alpaca has 1,304 tokens of Llama 2 and 1,044 of Llama 3.2, of litgpt's longest samples"
_WHOLE: Mapping[str, Any] = {"_component_": "torch.nn.CrossEntropyLoss"}
_CHUNKED: Mapping[str, Any] = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
_ADAMW: Mapping[str, Any] = {"_component_": "torch.optim.AdamW", "lr": 2e-5, "fused": True}
_ADAMW_8BIT: Mapping[str, Any] = {"_component_": "torchao.prototype.low_bit_optim.AdamW8bit", "lr": 2e-5}
_LORA: Mapping[str, Any] = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_dropout": 0.0,
}
_FULL_3B: Mapping[str, Any] = {"model": {"_component_": "torchtune.models.llama3_2.llama3_2_3b"}}
_SAVING: Mapping[str, Any] = {"enable_activation_checkpointing": True, "enable_activation_offloading": True}
_LADDER: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Baseline (unpacked, padded alpaca)": ("full", {**_FULL_3B, "loss": _WHOLE, "optimizer": _ADAMW}),
    "+ Compile": ("full", {**_FULL_3B, "loss": _WHOLE, "optimizer": _ADAMW}),
    "+ Chunked Cross Entropy": ("full", {**_FULL_3B, "loss": _CHUNKED, "optimizer": _ADAMW}),
    "+ Activation Offloading": (
        "full",
        {**_FULL_3B, **_SAVING, "loss": _CHUNKED, "optimizer": _ADAMW, "optimizer_in_bwd": True},
    ),
    "+ 8-bit AdamW": (
        "full",
        {**_FULL_3B, **_SAVING, "loss": _CHUNKED, "optimizer": _ADAMW_8BIT, "optimizer_in_bwd": True},
    ),
    "QLoRA": (
        "lora",
        {
            **_SAVING,
            "model": {
                "_component_": "torchtune.models.llama3_2.qlora_llama3_2_3b",
                **_LORA,
                "lora_rank": 64,
                "lora_alpha": 128,
            },
            "loss": _CHUNKED,
            "optimizer": _ADAMW,
        },
    ),
}
"""Settings that the rows of the ladder add to each other, by their notes."""


def recipe_parameters(
    recipe: str, configuration: Mapping[str, Any], *, batch_size: int, length: int, packed: bool = False
) -> dict[str, Any]:
    """Return the parameters of the script that runs a recipe."""
    return {
        "recipe": recipe,
        "configuration": configuration,
        "batch_size": batch_size,
        "length": length,
        "packed": packed,
    }


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    if record["n_gpus"] != "1":
        return "more than one GPU"
    if record["metric"].startswith("unknown"):
        return "the kind of memory is not stated"
    if "after init" in record["notes"]:
        return "memory before the first step"
    if "qlora_finetune.rst" in record["url_or_repo_path"]:
        return _of_tutorial(record)
    rung = record["notes"].removeprefix("cumulative ladder: ").partition(";")[0]
    if rung not in _LADDER:
        return f"recipe that is not rebuilt: {rung}"
    recipe, configuration = _LADDER[rung]
    packed = "packed" in record["seq_len"]
    length = 4096 if packed else _LENGTHS[record["model"]]
    parameters = recipe_parameters(recipe, configuration, batch_size=2, length=length, packed=packed)
    compiled = record["compile"] == "yes"
    return PublishedJob(
        group="torchtune, compiled" if compiled else "torchtune",
        title=f"{record['model']} {rung}, batch 2 x {length}",
        script="torchtune_recipe",
        parameters=parameters,
        stack=STACK,
        device="a100_80gb",
        metric="active",
        published_bytes=float(record["value_published"]) * 2**30,
        assumptions=(_COMPILED,) if compiled else (_LENGTH,),
    )


def _of_tutorial(record: Record) -> PublishedJob:
    """Return a run of the tutorial: LoRA of rank 8, with the loss of whole logits that torchtune 0.1 had."""
    name = "qlora_llama2_7b" if "QLoRA" in record["peft"] else "lora_llama2_7b"
    model = {"_component_": f"torchtune.models.llama2.{name}", **_LORA, "lora_rank": 8, "lora_alpha": 16}
    configuration = {
        "model": model, "loss": _WHOLE, "optimizer": {**_ADAMW, "fused": False},
        "enable_activation_checkpointing": True,
    }  # fmt: skip
    length = _LENGTHS[record["model"]]
    return PublishedJob(
        group="torchtune",
        title=f"{record['model']} {record['peft']}, batch 2 x {length}",
        script="torchtune_recipe",
        parameters=recipe_parameters("lora", configuration, batch_size=2, length=length),
        stack=STACK,
        device="a100_80gb",
        metric="reserved",
        published_bytes=float(record["value_published"]) * 1e9,
        assumptions=(_LENGTH,),
    )
