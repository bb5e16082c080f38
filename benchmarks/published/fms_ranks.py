"""fms-acceleration on 2 to 8 GPUs: trl's SFTTrainer under FSDP1 as accelerate sets it up.

A row runs with the transformers of its time: up to 4.45 a checkpoint surrounds each FSDP unit, later the unit surrounds
the checkpoint. With a frozen base FSDP holds a hook on the input of each unit until the end of the backward pass, and
so the input of each reentrant checkpoint and its gradient.
"""

import re
from typing import Any

from benchmarks.published import fms
from benchmarks.published.job import RANK_SCRIPT, PublishedJob, Record
from benchmarks.published.networks import network
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.training.setup import parallel_text

_LAYERS = {
    "mistral-7b": "MistralDecoderLayer",
    "powerlm-3b": "GraniteDecoderLayer",
    "santacoder": "GPTBigCodeBlock",
}
"""The networks that are rebuilt, with the class that FSDP wraps."""
_FRAMEWORKS = ("none", "aadp-padding-free", "aadp-padding-free-multipack")
"""The plug-ins for padding change batches and no kernels."""
_UNTRACEABLE = "transformers-4.39"
"""Its attention reads a position from the device, which a meta tensor does not have."""
_REBUILT = "adapters and the loop of fms-acceleration's ranks are rebuilt; their networks are those of transformers"
_MEAN = (
    "samples of padded batches have their mean length; their lengths are not published, and figures are lower bounds"
)


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    framework = fms.search(r"framework=(\S+)", record["task"])
    name, tokens = fms.NETWORKS.get(record["model"], (record["model"], 0))
    if fms.has_failed(record):
        return fms.FAILED
    if framework not in _FRAMEWORKS:
        return f"several GPUs, plug-in with kernels of its own or a quantised base: {framework}"
    if name not in _LAYERS:
        return f"several GPUs, network that is not rebuilt: {name}"
    stack = fms.stack_of(record["framework_versions"])
    if stack == _UNTRACEABLE:
        return "several GPUs, transformers before 4.43: its attention reads a value from the GPU"
    size, batch_size = int(record["n_gpus"]), int(record["micro_batch"])
    packed = "packed=[True]" in record["seq_len"]
    length = _length(record, name)
    mixed = re.search("autocast=true", record["dtype"], re.IGNORECASE) is not None
    lora = _lora(record)
    dtype = "fp32" if mixed and lora is None else "bf16"
    wrap = f"{_LAYERS[name]},Adapter" if lora else _LAYERS[name]
    kind = f"{'LoRA' if lora else 'full'}, {size} GPUs"
    return PublishedJob(
        group=f"several GPUs{'' if packed else ', padded'}",
        title=f"{name} {kind}, batch {batch_size} x {length}{', mixed' if mixed else ''}{'' if packed else ', mean'}",
        script=RANK_SCRIPT,
        parameters={
            "network": "transformers",
            "arguments": {"network": {**network(name), "vocab_size": tokens}, "dtype": dtype, "lora": lora},
            "length": length,
            "later_length": None,
            "training": {
                "batch_size": batch_size,
                "dtype": dtype,
                "autocast": "bf16" if mixed else None,
                "loss": "own",
                "optimizer": "AdamW",
                "accumulate": 1 if packed else 2,
                "parallel": parallel_text("fsdp1", {"world_size": size, "wrap": wrap}),
            },
        },
        stack=stack,
        device="a100_80gb",
        metric="smi" if record["metric"].startswith("smi") else "allocated",
        published_bytes=float(record["value_gib"]) * 1024 * MIB,
        assumptions=(_REBUILT,) if packed else (_REBUILT, _MEAN),
        guesses_lengths=not packed,
    )


def _lora(record: Record) -> dict[str, Any] | None:
    """Return the adapters of a row; peft keeps them in fp32 since 0.12."""
    options = fms.lora_of(record["peft"])
    if options is None:
        return None
    is_new = fms.release_of("peft", record["framework_versions"]) >= (0, 12)
    return {
        "rank": options["r"],
        "dropout": options["lora_dropout"],
        "targets": options["target_modules"],
        "dtype": "fp32" if is_new else "bf16",
    }


def _length(record: Record, name: str) -> int:
    """Return the tokens of a sample. Unpacked rows publish their mean alone, divided by the number of ranks."""
    logged = re.search(r"sample=(\d+)", record["seq_len"])
    if "packed=[True]" in record["seq_len"] or logged is None:
        return 2048 if name == "santacoder" else 4096
    return int(logged[1]) * int(record["n_gpus"])
