"""torchao's optimizers in 8 and 4 bits: Vision Transformers of timm (RTX 4070 Ti SUPER), and Llama 2 by torchtune."""

from typing import Any

from benchmarks.published import torchtitan
from benchmarks.published.job import PublishedJob, Record
from benchmarks.published.torchtune import STACK, recipe_parameters

_COMPILED = (
    "networks that were compiled are traced as eager code, and so are torchao's optimizers, which compile their step"
)
_SIZE = "torchao's script crops images to 224 pixels and divides bytes by 1e9; it was not seen"
_LENGTH = "the longest batch of Alpaca has 1,304 tokens of Llama 2, the length that litgpt publishes"
_OPTIMIZERS = ("AdamW", "bnb AdamW8bit", "ao AdamW8bit", "ao AdamWFp8", "ao AdamW4bit", "ao CPUOffloadOptimizer")
_LLAMA_OPTIMIZERS = {
    "bnb AdamW8bit": "bitsandbytes.optim.AdamW8bit",
    "ao AdamW8bit": "torchao.prototype.low_bit_optim.AdamW8bit",
    "ao AdamW4bit": "torchao.prototype.low_bit_optim.AdamW4bit",
}


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    if record["outcome"] != "ok" or not record["value_published"]:
        return "ran out of memory"
    if record["model"].startswith("Llama3-8B"):
        return torchtitan.job_of({**record, "model": "Llama 3 8B"})
    if record["n_gpus"] != "1":
        return "more than one GPU"
    if record["metric"] != "allocated":
        return "the kind of memory is not stated"
    if record["optimizer"] not in _OPTIMIZERS:
        return f"optimizer of another library: {record['optimizer']}"
    return _of_timm(record) if record["model"].startswith("timm ") else _of_llama(record)


def _of_timm(record: Record) -> PublishedJob:
    name = record["model"].removeprefix("timm ")
    compiled = record["compile"].startswith("yes")
    parameters = {
        "network": name.partition(".")[0],
        "image_size": 224,
        "batch_size": int(record["micro_batch"]),
        "optimizer": record["optimizer"],
        "full_bf16": record["dtype"] == "full bf16",
        "checkpointing": record["checkpointing"] == "yes",
    }
    return PublishedJob(
        group="torchao, compiled" if compiled else "torchao",
        title=f"{name} {record['optimizer']}, batch {record['micro_batch']}, {record['dtype']}",
        script="low_bit_adam",
        parameters=parameters,
        stack=STACK,
        device="rtx_4090",
        metric="allocated",
        published_bytes=float(record["value_published"]) * 1e9,
        assumptions=(_SIZE, _COMPILED) if compiled else (_SIZE,),
    )


def _of_llama(record: Record) -> PublishedJob | str:
    if record["model"] != "Llama 2 7B":
        return f"network that is not rebuilt: {record['model']}"
    if record["optimizer"] not in _LLAMA_OPTIMIZERS:
        return f"optimizer that is not rebuilt for Llama: {record['optimizer']}"
    configuration: dict[str, Any] = {
        "model": {"_component_": "torchtune.models.llama2.llama2_7b"},
        "optimizer": {"_component_": _LLAMA_OPTIMIZERS[record["optimizer"]], "lr": 1e-5},
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
        "enable_activation_checkpointing": True,
    }
    compiled = record["optimizer"].startswith("ao ")
    return PublishedJob(
        group="torchao, compiled" if compiled else "torchao",
        title=f"Llama 2 7B full, {record['optimizer']}, batch 2 x 1304",
        script="torchtune_recipe",
        parameters=recipe_parameters("full", configuration, batch_size=2, length=1304),
        stack=STACK,
        device="a100_80gb",
        metric="allocated",
        published_bytes=float(record["value_published"]) * 2**30,
        assumptions=(_LENGTH, _COMPILED) if compiled else (_LENGTH,),
    )
