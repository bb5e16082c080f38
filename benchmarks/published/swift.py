"""ms-swift's benchmark of December 2023: LoRA and full fine-tuning on an A100-80GB, reserved memory of a whole run.

ms-swift deletes samples that are longer than its limit, so the lengths of all batches vary, and the allocator's cache
grows over the run. The samples and their order are not published: orders are drawn, and their median is compared.
"""

import math
import random
import re
from functools import cache
from typing import Any

from benchmarks.published.job import PublishedJob, Record
from benchmarks.published.networks import network
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.replay.length_orders import STEP_BATCHES, LengthOrders

_NETWORKS = {
    "qwen-1_8b-chat": "qwen-1.8b",
    "qwen-7b-chat": "qwen-7b",
    "qwen-14b-chat": "qwen-14b",
    "yi-6b-chat": "yi-6b",
    "yi-34b-chat": "yi-34b",
}
_TARGETS = {"qwen": ["c_attn"], "llama": ["q_proj", "k_proj", "v_proj"]}
"""The default layers for LoRA in ms-swift."""
_SAMPLES, _MEAN, _DEVIATION, _LEAST, _MOST = 4959, 3234.4, 2547.5, 91, 19548
"""The tokens of cls-fudan-news-zh, from ms-swift's list of datasets."""
_ACCUMULATED = 16
_LENGTHS = (
    "the tokens of ms-swift's samples are log-normal with the published mean, deviation, least and most, for every "
    "tokenizer; samples above the limit are deleted; the figure is the median over random orders of up to 400 batches"
)


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    reasons = {
        "more than one GPU": record["n_gpus"] != "1" or "(2*A100)" in record["model"],
        "ran out of memory": record["outcome"] != "ok" or not record["value_gib"],
        "lengths of a mixed dataset are not published": not record["task"].startswith("cls-fudan-news-zh"),
        f"network whose code is in no package: {record['model']}": record["model"] not in _NETWORKS,
        "a quantised base under code that is in no package": record["dtype"] != "bf16",
        "attention of code that is in no package": not record["attention"].startswith("flash_attn"),
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    config = network(_NETWORKS[record["model"]])
    lora = _lora(record["peft"], config["model_type"])
    batch_size, longest = int(record["micro_batch"]), int(re.findall(r"\d+", record["seq_len"])[0])
    accumulate = max(_ACCUMULATED // batch_size, 1)
    samples = [length for length in _lengths() if length <= longest]
    orders = LengthOrders.of_samples(samples, batch_size, accumulate)
    parameters = {
        "network": config, "lora": lora, "batch_size": batch_size, "checkpointing": record["checkpointing"] == "yes",
        "accumulate": min(accumulate, STEP_BATCHES), "lengths": [*orders.traced, orders.traced[-1]],
    }  # fmt: skip
    kind = f"LoRA r={lora['r']}" if lora else "full"
    return PublishedJob(
        group="ms-swift",
        title=f"{record['model']} {kind}, batch {batch_size} x {longest}"
        f"{'' if parameters['checkpointing'] else ', no checkpointing'}",
        script="swift_sft",
        parameters=parameters,
        stack="swift-1.5",
        device="a100_80gb",
        metric="reserved",
        published_bytes=float(record["value_gib"]) * 1024 * MIB,
        assumptions=(_LENGTHS,),
        orders=orders,
    )


def _lora(text: str, kind: str) -> dict[str, Any] | None:
    if text == "full":
        return None
    match = re.fullmatch(r"LoRA r=(\d+) targets=DEFAULT.*", text)
    if match is None:
        raise ValueError(f"no rank and no default targets in {text!r}")
    return {"r": int(match[1]), "target_modules": _TARGETS[kind], "lora_alpha": 32, "lora_dropout": 0.05}


@cache
def _lengths() -> tuple[int, ...]:
    """Return the lengths of all samples before any is deleted."""
    generator = random.Random(0)
    variance = math.log(1 + (_DEVIATION / _MEAN) ** 2)
    location = math.log(_MEAN) - variance / 2
    drawn = (generator.lognormvariate(location, math.sqrt(variance)) for _ in range(_SAMPLES))
    return tuple(int(min(max(length, _LEAST), _MOST)) for length in drawn)
