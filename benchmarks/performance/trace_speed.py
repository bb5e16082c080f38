"""Cost of a trace: `python -m benchmarks.performance.trace_speed`.

Compares with a plain training step on the meta device, and with torch's MemTracker under FakeTensorMode.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.performance.resnet50 import resnet50
from vramcast.jobs.families.blocks import MeanOverSequence
from vramcast.jobs.plan import InputTensor
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions, CachingAllocator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.replay.replay import replay
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.tracing.trace import call_of
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.training.step import loss_of, random_inputs

Make = Callable[[], nn.Module]


def _transformer() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True) for _ in range(24)]
    return nn.Sequential(nn.Embedding(30000, 1024), *layers, MeanOverSequence(), nn.Linear(1024, 2))


def _mlp() -> nn.Module:
    blocks = [(nn.Linear(2048, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Dropout(0.1)) for _ in range(10)]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(2048, 100))


SUBJECTS: dict[str, tuple[Make, int, InputTensor]] = {
    "ResNet-50, batch 32": (resnet50, 32, InputTensor((3, 224, 224))),
    "Transformer of 24 layers, batch 8": (_transformer, 8, InputTensor((512,), 30000)),
    "MLP of 10 layers, batch 256": (_mlp, 256, InputTensor((2048,))),
}


def _step(subject: nn.Module, inputs: tuple[Tensor, ...], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    output = subject(*inputs)
    loss_of("cross_entropy", output).backward()
    optimizer.step()


def _on_meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        return make().train()


def _inputs(shape: InputTensor, batch_size: int, device: str = "meta") -> tuple[Tensor, ...]:
    return random_inputs([(shape.shape, shape.vocabulary)], batch_size, "fp32", device)


def bare_step(make: Make, batch_size: int, shape: InputTensor) -> float:
    """Time the second step on meta: the first makes the optimizer's state."""
    subject, inputs = _on_meta(make), _inputs(shape, batch_size)
    optimizer = torch.optim.Adam(subject.parameters(), foreach=True)
    _step(subject, inputs, optimizer)
    return _seconds(lambda: _step(subject, inputs, optimizer))


def traced_run(make: Make, batch_size: int, shape: InputTensor) -> float:
    """Time a whole trace: the first step, a steady one, and its repetitions."""
    subject, setup = _on_meta(make), TrainingSetup(batch_size=batch_size)
    return _seconds(lambda: trace_training(subject, lambda size: _inputs(shape, size), setup))


def tracked_step(make: Make, batch_size: int, shape: InputTensor) -> float:
    """Time one step under MemTracker and FakeTensorMode."""
    with FakeTensorMode():
        subject, inputs = make().train(), _inputs(shape, batch_size, "cpu")
        optimizer = torch.optim.Adam(subject.parameters(), foreach=True)
        tracker = MemTracker()
        tracker.track_external(subject, optimizer, *inputs)
        start = time.perf_counter()
        with tracker:
            _step(subject, inputs, optimizer)
        return time.perf_counter() - start


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def replayed_events() -> tuple[int, float]:
    """Return the number of replayed events and the seconds of the replay."""
    make, batch_size, shape = SUBJECTS["Transformer of 24 layers, batch 8"]
    setup = TrainingSetup(batch_size=batch_size)
    trace = trace_training(_on_meta(make), lambda size: _inputs(shape, size), setup, epochs=12)
    events = [(block, size if call_of(size) is None else MIB) for block, size in trace.events][:100_000]
    return len(events), _seconds(lambda: replay(events, CachingAllocator(None, AllocatorOptions())))


def main() -> None:
    """Print the ratios."""
    torch.set_num_threads(1)
    print("a whole trace (two steps and two repeated epochs), compared with one step of the alternatives")
    for name, subject in SUBJECTS.items():
        bare, traced, tracked = bare_step(*subject), traced_run(*subject), tracked_step(*subject)
        print(
            f"  {name}: {traced * 1e3:.0f} ms, {traced / bare:.2f} x a plain meta step ({bare * 1e3:.0f} ms),",
            end=" ",
        )
        print(f"{tracked / traced:.1f} x faster than MemTracker ({tracked * 1e3:.0f} ms)", flush=True)
    count, seconds = replayed_events()
    print(f"  replay: {count:,} events in {seconds:.2f} s")


if __name__ == "__main__":
    main()
