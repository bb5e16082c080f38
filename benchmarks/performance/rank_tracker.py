"""Simulated ranks against torch's FSDPMemTracker: `python -m benchmarks.performance.rank_tracker`.

Both run three steps of one rank of eight under FSDP2. The tracker runs twice: under FakeTensorMode as its documentation
says, on a mesh of the host, and on meta tensors with the patches of this project, where it is faster. Times are of the
CPU, without building the network.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vramcast.jobs.families.libraries import import_library
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.distributed.rank_context import rank_context
from vramcast.virtual_gpu.distributed.rank_session import trace_rank
from vramcast.virtual_gpu.distributed.rank_tracer import RankTracer
from vramcast.virtual_gpu.distributed.strategies import parallelize
from vramcast.virtual_gpu.distributed.wrap_policy import wrapped_modules
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.tracing.trace import Trace
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.training.step import make_optimizer, training_steps

_RANKS, _STEPS, _BATCH = 8, 3, 8
_PARALLELISM = Parallelism(strategy="fsdp2", world_size=_RANKS)


@dataclass(frozen=True)
class Tracked:
    """A network with its input."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: str = "cross_entropy"
    tokens: bool = False

    def batch(self, size: int, device: str = "meta") -> tuple[Tensor, ...]:
        """Return a batch."""
        shape = (size, *self.shape)
        return (
            torch.zeros(shape, dtype=torch.int64, device=device) if self.tokens else torch.empty(shape, device=device),
        )

    @property
    def setup(self) -> TrainingSetup:
        """Return how it is trained."""
        return TrainingSetup(batch_size=_BATCH, autocast="bf16", loss=self.loss)


class _LanguageModel(nn.Module):
    """A causal network of transformers with its own loss."""

    def __init__(self, layers: int, width: int, checkpointing: bool) -> None:
        super().__init__()
        transformers = import_library("transformers")
        config = transformers.LlamaConfig(
            vocab_size=8000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=4, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        self.subject = transformers.LlamaForCausalLM(config)
        if checkpointing:
            self.subject.gradient_checkpointing_enable()

    def forward(self, tokens: Tensor) -> Any:
        return self.subject(input_ids=tokens, labels=tokens)


def _perceptron() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(*blocks, nn.Linear(2048, 16))


CASES: Sequence[Tracked] = (
    Tracked("MLP, 8 blocks", _perceptron, (2048,)),
    Tracked("Llama, 8 layers", partial(_LanguageModel, 8, 1024, False), (512,), "own", tokens=True),
    Tracked("Llama, 8 layers, checkpointing", partial(_LanguageModel, 8, 1024, True), (512,), "own", tokens=True),
    Tracked("timm vit_small_patch16_224", lambda: import_library("timm").create_model("vit_small_patch16_224"),
            (3, 224, 224)),
)  # fmt: skip


def simulated(case: Tracked) -> tuple[float, float]:
    """Return the peak in MiB and the seconds of a simulated rank."""
    with torch.device("meta"):
        network = case.make().train()
    start = time.process_time()
    trace = trace_rank(network, case.batch, case.setup, _PARALLELISM)
    return _peak_bytes(trace) / MIB, time.process_time() - start


def _peak_bytes(trace: Trace) -> int:
    """Return the peak of the requested bytes."""
    sizes: dict[int, int] = {}
    held = peak = 0
    for block, size in trace.events:
        if block < 0:
            continue
        if size == FREE:
            held -= sizes.pop(block)
        else:
            sizes[block] = size
            held += size
            peak = max(peak, held)
    return peak


def tracked_on_meta(case: Tracked) -> tuple[float, float]:
    """Return the peak in MiB and the seconds of torch's tracker on meta tensors."""
    with torch.device("meta"):
        subject = case.make().train()
    network = getattr(subject, "subject", subject)
    start = time.process_time()
    tracer = RankTracer({})
    with rank_context(tracer, 0, _RANKS, 8.0):
        with RankTracer({}):
            parallelize(network, _PARALLELISM, case.setup, tracer)
        optimizer = make_optimizer("Adam", {}, "foreach", subject.parameters())
        tracker = FSDPMemTracker(network, optimizer)
        batches = ([case.batch(_BATCH)] for _ in range(_STEPS))
        with RankTracer({}), tracker:
            for _ in training_steps(subject, optimizer, batches, case.loss):
                tracker.reset_mod_stats()
    return _tracked_mib(tracker), time.process_time() - start


def tracked_with_fake_tensors(case: Tracked) -> tuple[float, float]:
    """Return the peak in MiB and the seconds of torch's tracker under FakeTensorMode."""
    dist.init_process_group("fake", rank=0, world_size=_RANKS, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (_RANKS,))  # it reads its ranks, which fake tensors do not have
        with torch.device("meta"):
            subject = case.make().train()
        with FakeTensorMode(allow_non_fake_inputs=True):
            subject.to_empty(device="cpu")
            network = getattr(subject, "subject", subject)
            blocks = wrapped_modules(network, ())
            start = time.process_time()
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in (*blocks, network):
                fully_shard(module, mesh=mesh, mp_policy=policy)
            optimizer = make_optimizer("Adam", {}, "foreach", subject.parameters())
            tracker = FSDPMemTracker(network, optimizer)
            batches = ([case.batch(_BATCH, "cpu")] for _ in range(_STEPS))
            with tracker:
                for _ in training_steps(subject, optimizer, batches, case.loss):
                    tracker.reset_mod_stats()
            return _tracked_mib(tracker), time.process_time() - start
    finally:
        dist.destroy_process_group()


def _tracked_mib(tracker: FSDPMemTracker) -> float:
    peak = tracker.get_tracker_snapshot("peak")
    return float(max(value for item in peak.values() for use, value in item.items() if "Total" in str(use))) / MIB


def main() -> None:
    """Print peaks and times of each network."""
    print(f"{'network':32} {'simulated':>20} {'tracker, meta':>27} {'tracker, fake tensors':>27}")
    for case in CASES:
        simulated(case)  # the first run of a process imports and compiles
        peak, seconds = simulated(case)
        cells = [f"{peak:9.2f} MiB {seconds:5.2f} s"]
        for track in (tracked_on_meta, tracked_with_fake_tensors):
            other, taken = track(case)
            cells.append(f"{other:9.2f} MiB {taken:5.2f} s {taken / seconds:4.1f} x")
        print(f"{case.name:32} {cells[0]:>20} {cells[1]:>27} {cells[2]:>27}", flush=True)


if __name__ == "__main__":
    main()
