"""fms-acceleration on 2 to 8 GPUs: trl's SFTTrainer under FSDP1, started by `accelerate launch`.

A row runs with the transformers, trl, peft and accelerate of its time: they choose the units that FSDP wraps, its mixed
precision, and the parameters that accelerate casts to fp32.
"""

import re

from benchmarks.published import fms
from benchmarks.published.job import PublishedJob, Record
from benchmarks.published.networks import network
from vramcast.virtual_gpu.allocator.sizes import MIB

_NETWORKS = ("mistral-7b", "powerlm-3b", "santacoder")
"""Networks without experts."""
_FRAMEWORKS = ("none", "aadp-padding-free", "aadp-padding-free-multipack")
"""The plug-ins for padding change batches and no kernels."""
_LAUNCHER = {
    "dynamo_backend": "no",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_sync_module_states": "true",
    "fsdp_use_orig_params": "true",
    "mixed_precision": "no",
    "num_machines": "1",
}
"""The accelerate.yaml of the benchmark, as its rows describe it; `fsdp_use_orig_params` and how weights are loaded are
not stated there, and follow the launcher's default and fms-hf-tuning. The Trainer sets mixed precision itself."""
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
    if name not in _NETWORKS:
        return f"several GPUs, network that is not rebuilt: {name}"
    ranks, batch_size = int(record["n_gpus"]), int(record["micro_batch"])
    packed = "packed=[True]" in record["seq_len"]
    length = _length(record, name)
    dtype, autocast = fms.precision_of(record)
    lora = fms.lora_of(record["peft"])
    kind = f"{'LoRA' if lora else 'full'}, {ranks} GPUs"
    mixed = f", {dtype}{', autocast' if autocast else ''}"
    return PublishedJob(
        group=f"several GPUs{'' if packed else ', padded'}",
        title=f"{name} {kind}, batch {batch_size} x {length}{mixed}{'' if packed else ', mean'}",
        script="sft_trainer",
        parameters={
            "network": network(name), "tokens": tokens, "batch_size": batch_size, "length": length, "dtype": dtype,
            "autocast": autocast, "accumulate": 1 if packed else 2, "lora": lora, "ranks": ranks,
            "keeps_inputs": False, "quantisation": None, "prepared": False,
        },
        launcher=_launcher(ranks),
        stack=fms.stack_of(record["framework_versions"]),
        device="a100_80gb",
        metric="smi" if record["metric"].startswith("smi") else "allocated",
        published_bytes=float(record["value_gib"]) * 1024 * MIB,
        assumptions=() if packed else (_MEAN,),
        guesses_lengths=not packed,
    )  # fmt: skip


def _launcher(ranks: int) -> tuple[str, ...]:
    """Return the options of the interpreter that start a script on several GPUs."""
    options = [word for name, value in _LAUNCHER.items() for word in (f"--{name}", value)]
    return ("-m", "accelerate.commands.launch", "--use_fsdp", "--num_processes", str(ranks), *options)


def _length(record: Record, name: str) -> int:
    """Return the tokens of a sample. Unpacked rows publish their mean alone, divided by the number of ranks."""
    logged = re.search(r"sample=(\d+)", record["seq_len"])
    if "packed=[True]" in record["seq_len"] or logged is None:
        return 2048 if name == "santacoder" else 4096
    return int(logged[1]) * int(record["n_gpus"])
