"""torchtitan's pre-training runs on 8 and more GPUs: reserved and active memory of a rank, without torch.compile."""

import re
from typing import Any

from benchmarks.published.job import RANK_SCRIPT, PublishedJob, Record
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.training.setup import parallel_text

_NETWORKS: dict[str, dict[str, Any]] = {
    "Llama 3": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128256},
    "Llama 2 7B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocabulary": 32000},
    "Qwen3 32B": {
        "layers": 64, "width": 5120, "heads": 64, "kv_heads": 8, "hidden": 25600, "vocabulary": 151936, "head": 128,
        "normed": True,
    },
}  # fmt: skip
"""By the start of a row's model; all rows of Llama 3 that are rebuilt are of 8B."""
_DEVICES = {"H100": "h100_80gb", "A100": "a100_80gb"}
_REBUILT = "torchtitan's network and its loop are rebuilt: torchtitan itself does not run"


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    model = next((name for name in _NETWORKS if record["model"].startswith(name)), None)
    device = next((name for gpu, name in _DEVICES.items() if record["gpu"].startswith(gpu)), None)
    kind = re.fullmatch(r"(FSDP[12]?) (\d+)(?:, reshard_after_forward=(\w+))?", record["parallelism"])
    if reason := _reason(record):
        return reason
    if model is None:
        return f"network that is not rebuilt: {record['model']}"
    if device is None:
        return f"GPU without a profile: {record['gpu']}"
    if kind is None:
        return "tensor, sequence, context or pipeline parallelism"
    strategy, size, reshard = kind.groups()
    options = {"world_size": int(size), "wrap": "TitanBlock", "reduce_dtype": "fp32"}
    options["shard_after_forward"] = reshard != "never"
    parallel = parallel_text("fsdp1" if strategy == "FSDP1" else "fsdp2", options)
    return _job(record, {**_NETWORKS[model], "keeps_last": reshard != "always"}, device, parallel)


def _reason(record: Record) -> str | None:
    """Return the reason why a row cannot be rebuilt, whatever its network."""
    reasons = {
        "ran out of memory": record["outcome"] != "ok" or not record["value_gib"],
        "torch.compile": record["compile"].startswith(("yes", "per")),
        "torch.compile is not stated": record["compile"].startswith("?"),
        "float8": "float8" in record["dtype"],
        "the loss is computed in chunks": "chunked" in record["notes"],
        "memory of the first step alone": record["notes"].startswith("step 1 "),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _job(record: Record, sizes: dict[str, Any], device: str, parallel: str) -> PublishedJob:
    visible = re.search(r"([\d.]+) GiB visible", record["gpu"])
    length, batch_size = int(record["seq_len"]), int(record["micro_batch"])
    checkpointing = "full" if record["checkpointing"] == "full" else "selective"
    early = "Mar 2024" in record["framework_versions"]
    return PublishedJob(
        group="torchtitan",
        title=f"{record['model']}, {record['parallelism']}, batch {batch_size} x {length}, {checkpointing}",
        script=RANK_SCRIPT,
        parameters={
            "network": "titan",
            "arguments": {**sizes, "length": length, "checkpointing": checkpointing, "early": early},
            "length": length,
            "later_length": None,
            "training": {
                "batch_size": batch_size,
                "autocast": "bf16",
                "loss": "own",
                "optimizer": "AdamW",
                "parallel": parallel,
            },
        },
        stack=None,
        device=device,
        metric=record["metric"].split()[0],
        published_bytes=float(record["value_gib"]) * 1024 * MIB,
        visible_mib=int(float(visible[1]) * 1024) if visible else None,
        assumptions=(_REBUILT,),
    )
