"""Take one measurement in a new process and print it as JSON.

Run `python -m benchmarks.performance.growth.child KIND SIZE`.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.performance.resnet50 import resnet50
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.training.step import random_inputs

_BATCH = 8
_WIDTH = 64
_LAYERS = 10
_LEAST_MIB = 0.1
"""The smallest reported growth: the kernel counts in larger steps."""

Shape = tuple[int, ...]


def by_layers(count: int) -> tuple[nn.Module, int, Shape]:
    """Return a network with this many layers, alternately Linear and ReLU."""
    pairs = ((nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(count // 2))
    return nn.Sequential(*(layer for pair in pairs for layer in pair)), _BATCH, (_WIDTH,)


def by_parameters(count: int) -> tuple[nn.Module, int, Shape]:
    """Return ten square Linear layers with this many weights in total."""
    width = round(math.sqrt(count / _LAYERS))
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS))), _BATCH, (width,)


def by_batch(size: int) -> tuple[nn.Module, int, Shape]:
    """Return ResNet-50 with this batch size."""
    return resnet50(), size, (3, 224, 224)


KINDS: dict[str, Callable[[int], tuple[nn.Module, int, Shape]]] = {
    "layers": by_layers,
    "parameters": by_parameters,
    "batch": by_batch,
}


def traced(kind: str, size: int) -> dict[str, float]:
    """Return the CPU seconds of a trace, the peak memory of the process, and the trace's share of that peak."""
    _trace(*by_layers(2))  # warm up: torch initialises itself once per process
    start, before = time.process_time(), _peak_mib()
    _trace(*_on_meta(KINDS[kind], size))
    seconds, peak = time.process_time() - start, _peak_mib()
    return {"seconds": seconds, "peak_mib": peak, "grown_mib": max(peak - before, _LEAST_MIB)}


def _on_meta(make: Callable[[int], tuple[nn.Module, int, Shape]], size: int) -> tuple[nn.Module, int, Shape]:
    with torch.device("meta"):
        return make(size)


def _trace(subject: nn.Module, batch_size: int, shape: Shape) -> None:
    subject = subject.to("meta").train()
    setup = TrainingSetup(batch_size=batch_size)
    trace_training(subject, lambda count: random_inputs([(shape, None)], count, "fp32", "meta"), setup)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(traced(sys.argv[1], int(sys.argv[2]))))
