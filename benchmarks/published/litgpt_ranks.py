"""litgpt's resource tables on several GPUs: LoRA under FSDP1, with gradients that are reduced after 128 samples.

Adapters and frozen weights share the flat parameter of a block, so the gradient of the whole block is allocated. It is
not sharded before the last microbatch of a step: each rank holds the gradients of the whole network.
"""

from typing import Any

from benchmarks.published.job import RANK_SCRIPT, PublishedJob, Record
from vramcast.virtual_gpu.training.setup import parallel_text

_NETWORKS: dict[str, dict[str, Any]] = {
    "phi-1.5 1.3B": {
        "layers": 24, "width": 2048, "heads": 32, "vocabulary": 51200, "rotary": 0.5, "shared_norm": True,
        "head_bias": True, "approximate": "tanh",
    },
    "StableLM Alpha 3B": {"layers": 16, "width": 4096, "heads": 32, "vocabulary": 50688, "rotary": 0.25},
}  # fmt: skip
_LATER_LENGTH = 128
_SHORT = (
    f"batches after the longest of litgpt's ranks have {_LATER_LENGTH} tokens; lengths are not published, and figures "
    "are lower bounds"
)
_REBUILT = "the network of litgpt's ranks is rebuilt: litgpt itself does not run"


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    if record["outcome"] != "ok":
        return "ran out of memory, or not supported"
    if record["model"] not in _NETWORKS:
        return f"network that is not rebuilt on several GPUs: {record['model']}"
    length, batch_size, size = (int(record[name].split()[0]) for name in ("seq_len", "micro_batch", "n_gpus"))
    return PublishedJob(
        group="litgpt resource tables, several GPUs",
        title=f"{record['model']} LoRA, {size} GPUs, batch {batch_size} x {length}",
        script=RANK_SCRIPT,
        parameters={
            "network": "litgpt",
            "arguments": {**_NETWORKS[record["model"]], "length": length},
            "length": length,
            "later_length": _LATER_LENGTH,
            "training": {
                "batch_size": batch_size,
                "dtype": "bf16",
                "loss": "own",
                "optimizer": "AdamW",
                "accumulate": 2,
                "parallel": parallel_text("fsdp1", {"world_size": size, "wrap": "LitBlock"}),
            },
        },
        stack=None,
        device="a100_40gb",
        metric="allocated",
        published_bytes=float(record["value_published"].split()[0]) * 1e9,
        assumptions=(_SHORT, _REBUILT),
    )
