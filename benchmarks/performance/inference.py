"""Latency of a released checkpoint for one job on one core: `python -m benchmarks.performance.inference`.

Features, networks and buckets are timed, as in `predict`; the trace is not: see `benchmarks.performance.trace_speed`.
"""

import os
import time
from pathlib import Path

import numpy as np
import torch

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.device.profiles import load_profile
from vramcast.jobs.families.gpumemnet import spec_of_filename
from vramcast.models.buckets import Buckets
from vramcast.models.checkpoint import load_checkpoint
from vramcast.models.estimators.ensemble import Ensemble
from vramcast.models.examples import example_of_table, table_of
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.replay.simulate import simulate

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
PUBLISHED = "GPUMemNet, on a GPU and for a batch of 128: 2.3 ms (MLP estimator), 10.6 ms (Transformer estimator)"
JOBS = {
    "mlp": "input:784_output:10_depth:6_arch:pyramid_batch:64.out",
    "cnn": "input_channels:3_num_classes:100_depth:12_arch:residual_base_filters:48_batch:16_input_size:64"
    "_act:relu_dropout:0.2_dropout:True_batchnorm:True.out",
    "transformer": "num_classes:100_embedding_size:256_num_layers:8_num_heads:4_ff_hidden_size:600_dropout_rate:0.1"
    "_seq_length:128_input_size:50000_num_samples:1000_batch_size:8.out",
}
CALLS = 200


def example_of(name: str):
    """Return one of GPUMemNet's jobs on an A100 as an example."""
    spec, profile = spec_of_filename(JOBS[name]), load_profile("a100_40gb")
    simulation = simulate(trace_spec(spec, profile.compute_capability), profile, AllocatorOptions())
    return example_of_table(table_of(spec), spec.training, profile, simulation, spec.family)


def milliseconds(estimator, example) -> np.ndarray:
    """Return the sorted milliseconds of each call, without the first ones, which fill caches."""
    buckets = Buckets(1024 * MIB, example.capacity_bytes)
    durations = []
    for _ in range(CALLS + 10):
        start = time.perf_counter()
        estimator.predict([example], buckets)
        durations.append(1000 * (time.perf_counter() - start))
    return np.sort(durations[10:])


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print(f"predict of one job, one core, {CALLS} calls; published: {PUBLISHED}")
    examples = {name: example_of(name) for name in JOBS}
    for directory in sorted(CHECKPOINTS.iterdir()):
        estimator = load_checkpoint(directory)
        kind = next((name for name in JOBS if f"_{name}_by" in directory.name), "cnn")
        durations = milliseconds(estimator, examples[kind])
        p50, p99 = durations[len(durations) // 2], durations[int(0.99 * len(durations))]
        networks = len(estimator.members) if isinstance(estimator, Ensemble) else 0
        print(f"  {directory.name:38} {networks} networks  p50 {p50:5.2f} ms  p99 {p99:5.2f} ms", flush=True)


if __name__ == "__main__":
    main()
