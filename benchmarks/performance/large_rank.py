"""Cost of a large rank: `python -m benchmarks.performance.large_rank`.

Traces and replays one rank of Llama 3 70B under FSDP2 on 64 GPUs, with full checkpointing, and prints peaks, the time
and the memory of this process.
"""

import resource
import time

import torch
from torch import Tensor

from benchmarks.published.ranks.losses import LanguageLoss
from benchmarks.published.ranks.titan_network import TitanLlama
from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.allocator import CachingAllocator
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.distributed.rank_session import trace_rank
from vramcast.virtual_gpu.replay.replay import replay
from vramcast.virtual_gpu.replay.simulate import lower
from vramcast.virtual_gpu.training.setup import TrainingSetup

GIB = 2**30
_LENGTH = 8192
_LLAMA_70B = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocabulary": 128256}


def main() -> None:
    """Print the peaks of the rank and what they cost."""
    start, start_cpu = time.perf_counter(), time.process_time()
    with torch.device("meta"):
        network = TitanLlama(**_LLAMA_70B, length=_LENGTH, checkpointing="full")

    def batch(size: int) -> tuple[Tensor, ...]:
        tokens, labels = (torch.randint(100, (size, _LENGTH), device="meta") for _ in range(2))
        return tokens, labels

    profile = load_profile("h100_80gb")
    setup = TrainingSetup(batch_size=1, autocast="bf16", loss="own", optimizer="AdamW")
    parallelism = Parallelism(strategy="fsdp2", world_size=64, wrap="TitanBlock")
    trace = trace_rank(LanguageLoss(network).train(), batch, setup, parallelism, 0, profile.compute_capability)
    events = lower(trace, profile).events
    result = replay(events, CachingAllocator(), streams=trace.streams, operations=trace.stream_operations)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    print(
        f"Llama 3 70B, rank 0 of 64, FSDP2, batch 1 x {_LENGTH}: "
        f"{result.peak_allocated_bytes / GIB:.2f} GiB allocated, {result.peak_reserved_bytes / GIB:.2f} GiB reserved"
    )
    print(f"{seconds:.1f} s, of which {cpu_seconds:.1f} s on the CPU; {held:.2f} GiB of host memory")


if __name__ == "__main__":
    main()
