"""torchtitan's pre-training runs on 8 and more GPUs: reserved and active memory of a rank, eager and compiled.

Settings that a row does not state are those of torchtitan's source at the row's date, never those that fit.
"""

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
_EXPANDABLE = (2024, 10, 22)
"""run_llama_train.sh sets expandable segments since commit a5e57e4a9; it does not at 83c879f18, of March 2024."""
_LOSSES = (((2024, 3, 1), False), ((2024, 12, 18), False), ((2025, 4, 2), True))
"""Since these dates a compiled job does not compile its loss (e8977b007), or does (bbb1b616e). The loss of March 2024
is taken as eager: its source was not read, and those rows name the network alone."""
_WHOLE = "the network was compiled as a whole, in March 2024; each block is compiled here, since FSDP2's hooks split it"
_MONTHS = {"Mar 2024": (2024, 3, 1), "Jan 2025": (2025, 1, 1), "mid-2025": (2025, 6, 1)}
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
        "the number of GPUs is not stated": "n_gpus not stated" in record["notes"],
        "torch.compile is not stated": record["compile"].startswith("?"),
        "float8 with an all-gather in float8": "all-gather" in record["notes"],
        "a form of float8 that is not rebuilt": _float8(record) == "other",
        "the date of the source is not stated": _date(record) is None,
        "the loss is computed in chunks": "chunked" in record["notes"],
        "memory of the first step alone": record["notes"].startswith("step 1 "),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _date(record: Record) -> tuple[int, ...] | None:
    """Return the date of torchtitan's source, year, month and day."""
    text = record["framework_versions"]
    exact = re.search(r"(20\d\d)-(\d\d)(?:-(\d\d))?", text)
    if exact:
        return tuple(int(part or 1) for part in exact.groups())
    return next((date for month, date in _MONTHS.items() if month in text), None)


def _float8(record: Record) -> str | None:
    """Return torchao's recipe of a row, None for bf16, 'other' for one that is not rebuilt."""
    text = record["dtype"] if "float8" in record["dtype"] else record["notes"]
    if "float8" not in text:
        return None
    if "prototype" in text:
        return "other"
    return "rowwise" if "rowwise" in text else "tensorwise"


def _settings(record: Record) -> tuple[dict[str, Any], bool, tuple[str, ...]]:
    """Return the training options of the compiler, the allocator's setting, and where they were read."""
    date = _date(record) or (0,)
    expandable = date >= _EXPANDABLE
    if not record["compile"].startswith(("yes", "per")):
        return {}, expandable, ()
    compiled_loss = [value for since, value in _LOSSES if date >= since][-1]
    where = "-".join(map(str, date))
    read = f"allocator and loss are those of torchtitan's source of {where}: expandable segments {expandable}, "
    notes = (f"{read}compiled loss {compiled_loss}", *([_WHOLE] if date < _EXPANDABLE else []))
    return {"compile": "blocks", "compile_loss": compiled_loss}, expandable, notes


def _checkpointing(record: Record) -> str:
    text = record["checkpointing"]
    return text if text in ("full", "none") else "alternate" if "2nd" in text else "selective"


def _job(record: Record, sizes: dict[str, Any], device: str, parallel: str) -> PublishedJob:
    visible = re.search(r"([\d.]+) GiB visible", record["gpu"])
    length, batch_size = int(record["seq_len"]), int(record["micro_batch"].split()[0])
    checkpointing = _checkpointing(record)
    options, expandable, notes = _settings(record)
    float8 = _float8(record)
    early = "Mar 2024" in record["framework_versions"]
    return PublishedJob(
        group=f"torchtitan{', compiled' if options else ''}{', float8' if float8 else ''}",
        title=f"{record['model']}, {record['parallelism']}, batch {batch_size} x {length}, {checkpointing}",
        script=RANK_SCRIPT,
        parameters={
            "network": "titan",
            "arguments": {
                **sizes,
                "length": length,
                "checkpointing": checkpointing,
                "early": early,
                **({"float8": float8} if float8 else {}),
            },
            "length": length,
            "later_length": None,
            "expandable_segments": expandable,
            "training": {
                "batch_size": batch_size,
                "autocast": "bf16",
                "loss": "own",
                "optimizer": "AdamW",
                "parallel": parallel,
                **options,
            },
        },
        stack=None,
        device=device,
        metric=record["metric"].split()[0],
        published_bytes=float(record["value_gib"]) * 1024 * MIB,
        visible_mib=int(float(visible[1]) * 1024) if visible else None,
        assumptions=(_REBUILT, *notes),
    )
