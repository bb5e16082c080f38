"""Rows of litgpt's resource tables: LoRA under FSDP1, with gradients that are reduced after 128 samples.

Adapters and frozen weights share the flat parameter of a block, so the gradient of the whole block is allocated. It is
not sharded before the last microbatch of a step: each rank holds the gradients of the whole network.
"""

from torch import nn

from benchmarks.field.ranks.cases import Case, Record
from benchmarks.field.ranks.litgpt_network import ChunkedLoss, LitGPT
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.training_setup import TrainingSetup

_NETWORKS = {
    "phi-1.5 1.3B": {
        "layers": 24,
        "width": 2048,
        "heads": 32,
        "vocabulary": 51200,
        "rotary": 0.5,
        "shared_norm": True,
        "head_bias": True,
        "approximate": "tanh",
    },
    "StableLM Alpha 3B": {"layers": 16, "width": 4096, "heads": 32, "vocabulary": 50688, "rotary": 0.25},
}
_LATER_LENGTH = 128
"""The longest sample comes first. Lengths of later batches are not published: these are short, so the figure is a lower
bound."""


def litgpt_case(record: Record) -> Case | str:
    """Return the case of a row of litgpt, or the reason why it is left out."""
    if int(record["n_gpus"]) < 2:
        return "one GPU"
    if record["outcome"] != "ok":
        return "ran out of memory, or not supported"
    network = _NETWORKS.get(record["model"])
    if network is None:
        return "another network"
    length, batch, size = int(record["seq_len"].split()[0]), int(record["micro_batch"]), int(record["n_gpus"])

    def make() -> nn.Module:
        return ChunkedLoss(LitGPT(**network, length=length).bfloat16())

    return Case(
        f"{record['model']} LoRA, {size} GPUs, batch {batch} x {length}",
        "allocated",
        float(record["value_gib"]),
        "a100_40gb",
        make,
        length,
        TrainingSetup(batch_size=batch, dtype="bf16", loss="own", optimizer="AdamW", accumulate=2),
        Parallelism(strategy="fsdp1", world_size=size, wrap="LitBlock"),
        (record["model"], size, batch),
        later_length=_LATER_LENGTH,
    )
