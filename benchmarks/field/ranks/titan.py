"""Rows of torchtitan without torch.compile and float8."""

import re

from torch import nn

from benchmarks.field.ranks.cases import Case, Record
from benchmarks.field.ranks.losses import LanguageLoss
from benchmarks.field.ranks.titan_network import TitanLlama
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.training_setup import TrainingSetup

_LLAMA = {
    "Llama 3": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128256},
    "Llama 2 7B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocabulary": 32000},
}
_QWEN = {
    "layers": 64, "width": 5120, "heads": 64, "kv_heads": 8, "hidden": 25600, "vocabulary": 151936, "head": 128,
    "normed": True,
}  # fmt: skip
_NETWORKS: dict[str, dict[str, int]] = {**_LLAMA, "Qwen3 32B": _QWEN}
_RESHARD = {"never": False}


def torchtitan_case(record: Record) -> Case | str:
    """Return the case of a row of torchtitan, or the reason why it is left out."""
    model = next((name for name in _NETWORKS if record["model"].startswith(name)), None)
    kind = re.match(r"(FSDP[12]?) (\d+)(, reshard_after_forward=(\w+))?$", record["parallelism"])
    if record["outcome"] != "ok" or not record["value_gib"]:
        return "ran out of memory"
    if record["compile"].startswith(("yes", "per", "?")) or "float8" in record["dtype"]:
        return "compiled or float8"
    if model is None or kind is None:
        return "another network, or with tensor parallelism and sequence parallelism"
    if "chunked" in record["notes"]:
        return "chunked loss"
    if record["notes"].startswith("step 1 "):
        return "first step alone"
    early = "2024" in record["framework_versions"] and "Mar" in record["framework_versions"]
    checkpointing = "full" if record["checkpointing"] == "full" else "selective"
    visible = re.search(r"([\d.]+) GiB visible", record["gpu"])
    length, batch = int(record["seq_len"]), int(record["micro_batch"])

    def make() -> nn.Module:
        network = TitanLlama(**_NETWORKS[model], length=length, checkpointing=checkpointing, early=early)
        return LanguageLoss(network, keeps=early)

    parallelism = Parallelism(
        strategy="fsdp1" if kind[1] == "FSDP1" else "fsdp2",
        world_size=int(kind[2]),
        wrap="Block",
        reduce_dtype="fp32",
        shard_after_forward=_RESHARD.get(kind[4], True),
    )
    return Case(
        f"{record['model'][:10]} {record['parallelism']}, batch {batch} x {length}, {checkpointing}",
        record["metric"].split()[0],
        float(record["value_gib"]),
        "h100_80gb",
        make,
        length,
        TrainingSetup(batch_size=batch, autocast="bf16", loss="own", optimizer="AdamW"),
        parallelism,
        (record["model"], record["parallelism"], batch, length, checkpointing),
        float(visible[1]) if visible else None,
    )
