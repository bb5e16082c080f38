"""Published memory of one rank against the simulation: `python -m benchmarks.field.published_ranks --data DIRECTORY`.

The directory holds tables of torchtitan and fms-acceleration that are not part of this repository. Rows with kernels or
libraries that are not simulated (torch.compile, float8, quantised bases, fused kernels) are left out and counted.
"""

import argparse
import csv
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.field.rank_networks import LanguageLoss, TitanLlama, add_lora
from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.families.libraries import import_library
from vramcast.virtual_gpu.allocator import CachingAllocator
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.distributed.rank_session import trace_rank
from vramcast.virtual_gpu.replay import Replay, replay
from vramcast.virtual_gpu.simulate import lower
from vramcast.virtual_gpu.training_setup import TrainingSetup

GIB = 2**30
Record = dict[str, str]
_LLAMA = {
    "Llama 3": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128256},
    "Llama 2 7B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocabulary": 32000},
}
_RESHARD = {"never": False}
_PLUGINS = ("foak", "liger", "autogptq", "bnb", "fast-kernels", "padding-free", "moe")


@dataclass(frozen=True)
class Case:
    """A row that can be simulated."""

    name: str
    metric: str
    published_gib: float
    device: str
    make: Callable[[], nn.Module]
    length: int
    setup: TrainingSetup
    parallelism: Parallelism
    key: Any = None
    """Equal for rows that share a simulation."""


def torchtitan_case(record: Record) -> Case | str:
    """Return the case of a row of torchtitan, or the reason why it is left out."""
    model = next((name for name in _LLAMA if record["model"].startswith(name)), None)
    kind = re.match(r"(FSDP[12]) (\d+)(, reshard_after_forward=(\w+))?$", record["parallelism"])
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
    length, batch = int(record["seq_len"]), int(record["micro_batch"])

    def make() -> nn.Module:
        network = TitanLlama(**_LLAMA[model], length=length, checkpointing=checkpointing, early=early)
        return LanguageLoss(network, keeps=early)

    parallelism = Parallelism(
        strategy=kind[1].lower(),
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
    )


def fms_case(record: Record) -> Case | str:
    """Return the case of a row of fms-acceleration, or the reason why it is left out."""
    if int(record["n_gpus"]) < 2:
        return "one GPU"
    if not record["metric"].startswith("allocated") or record["outcome"] != "ok":
        return "measured by nvidia-smi, or failed"
    if record["model"] != "mistralai/Mistral-7B-v0.1":
        return "another network"
    text = (record["peft"] + record["task"] + record["notes"] + record["optimizer"] + record["attention"]).lower()
    if any(word in text for word in _PLUGINS):
        return "kernels of a plug-in, or a quantised base"
    if "packed=[True]" not in record["seq_len"]:
        return "batches of varying length"
    mixed = "autocast=True" in record["dtype"] or "autocast=TRUE" in record["dtype"]
    half = "fp16" if "float16 " in record["dtype"].replace("bfloat16", "") else "bf16"
    lora = re.search(r"r=(\d+).*dropout=([\d.]+)", record["peft"])
    size, batch = int(record["n_gpus"]), int(record["micro_batch"])

    def make() -> nn.Module:
        transformers = import_library("transformers")
        network = transformers.MistralForCausalLM(transformers.MistralConfig(use_cache=False))
        network.to(torch.float32 if mixed and not lora else torch.bfloat16)
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora:
            add_lora(network, ("q_proj", "k_proj", "v_proj", "o_proj"), int(lora[1]), float(lora[2]))
        return LanguageLoss(network, own=True)

    wrap = "MistralDecoderLayer,Adapter" if lora else "MistralDecoderLayer"
    return Case(
        f"Mistral-7B {'LoRA' if lora else 'full'}, {size} GPUs, batch {batch}{', mixed' if mixed else ''}",
        "allocated",
        float(record["value_gib"]),
        "a100_80gb",
        make,
        4096,
        TrainingSetup(
            batch_size=batch,
            dtype="fp32" if mixed and not lora else "bf16",
            autocast=half if mixed and not lora else None,
            loss="own",
            optimizer="AdamW",
        ),
        Parallelism(strategy="fsdp1", world_size=size, wrap=wrap),
        ("fms", size, batch, mixed, bool(lora), lora[2] if lora else None),
    )


SOURCES: dict[str, Callable[[Record], Case | str]] = {
    "torchtitan.csv": torchtitan_case,
    "fms_acceleration.csv": fms_case,
}


def simulated(case: Case) -> Replay:
    """Simulate a case on a device without a memory limit."""
    with torch.device("meta"):
        network = case.make().train()
    profile = load_profile(case.device)

    def batch(size: int) -> tuple[Tensor, ...]:
        tokens, labels = (torch.randint(100, (size, case.length), device="meta") for _ in range(2))
        return tokens, labels

    trace = trace_rank(network, batch, case.setup, case.parallelism, 0, profile.compute_capability)
    return replay(
        lower(trace, profile).events,
        CachingAllocator(),
        streams=trace.streams,
        operations=trace.stream_operations,
    )


def _figure(result: Replay, metric: str) -> float:
    peaks = {
        "allocated": result.peak_allocated_bytes,
        "active": result.peak_active_bytes,
        "reserved": result.peak_reserved_bytes,
    }
    return peaks[metric] / GIB


def compared(path: Path, left_out: Counter[str]) -> Iterator[tuple[Case, float]]:
    """Yield each case of a table with its simulated figure; equal cases are simulated once and averaged."""
    cases: dict[Any, list[Case]] = {}
    with path.open(newline="") as lines:
        for record in csv.DictReader(lines):
            case = SOURCES[path.name](record)
            if isinstance(case, str):
                left_out[case] += 1
            else:
                cases.setdefault((case.key, case.metric), []).append(case)
    results: dict[Any, Replay] = {}
    for (key, metric), equal in cases.items():
        if key not in results:
            results[key] = simulated(equal[0])
        published = statistics.median(item.published_gib for item in equal)
        yield replace(equal[0], published_gib=published), _figure(results[key], metric)


def main() -> None:
    """Print each comparison, then the median and the 90th percentile of the errors of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIRECTORY")
    directory = parser.parse_args().data
    for name in SOURCES:
        if not (directory / name).exists():
            print(f"{name}: not there")
            continue
        errors, left_out = [], Counter[str]()
        print(name)
        for case, figure in compared(directory / name, left_out):
            error = figure / case.published_gib - 1
            errors.append(abs(error))
            print(
                f"  {case.name:64} {case.metric:9} {case.published_gib:8.2f} {figure:8.2f} GiB {error:+7.1%}",
                flush=True,
            )
        if errors:
            high = sorted(errors)[min(int(0.9 * len(errors)), len(errors) - 1)]
            print(f"  {len(errors)} rows: median error {statistics.median(errors):.1%}, 90th percentile {high:.1%}")
        for reason, count in left_out.most_common():
            print(f"  left out: {count} rows, {reason}")


if __name__ == "__main__":
    main()
