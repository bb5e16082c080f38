"""Compare public inference with its simulation: `python -m benchmarks.inference_rows --data DIR`.

DIR holds optimum_inference_a100.csv. The networks are built by the installed transformers with what the release of the
rows (4.35) did otherwise: it casts logits to fp32, and while a token is decoded it holds the caches of the step before
for all layers (its `generate` keeps `past_key_values` until the step is over). Rows of GPTQ bases are counted and not
simulated: their ExLlama kernels have buffers of their own.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, cache_utils

from vramcast.commands.exit_codes import CommandParser, exit_code
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.building import build_job
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.measurement import Measurement, Status

_FILE = "optimum_inference_a100.csv"
_MB = 1e6
_SIZES = {
    "NousResearch/Llama-2-7b-hf": {},
    "NousResearch/Llama-2-13b-hf": {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
}  # fmt: skip
"""Settings that differ from the defaults of LlamaConfig, which are those of 7B."""


def main(argv: Sequence[str]) -> int:
    """Compare the rows and return the exit code."""
    return exit_code("benchmarks.inference_rows", lambda: _compare(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m benchmarks.inference_rows", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=f"the directory of {_FILE}")
    return parser


def _compare(arguments: argparse.Namespace) -> None:
    path = arguments.data / _FILE
    if not path.is_file():
        raise UserError(f"expected {_FILE} in {arguments.data}, found none: name its directory with --data")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    comparable = [row for row in rows if row["model"] in _SIZES and not row["backend.quantization_scheme"]]
    for mode in ("forward", "generate"):
        _print_rows(mode, comparable, len(rows))


def _print_rows(mode: str, rows: Sequence[dict[str, str]], count: int) -> None:
    start = time.perf_counter()
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    print(f"{mode:28} {'kind':9} {'batch':>5}  {'allocated':>9} {'simulated':>9}  {'reserved':>9} {'simulated':>9}")
    for row in rows:
        size, length = (int(row[f"benchmark.input_shapes.{name}"]) for name in ("batch_size", "sequence_length"))
        new_tokens = int(row["benchmark.new_tokens"]) if mode == "generate" else None
        peak = _simulated(row["model"], size, length, new_tokens)
        figures = []
        for name, simulated in (("allocated", peak.allocated_bytes), ("reserved", peak.reserved_bytes)):
            measured = float(row[f"{mode}.max_memory_{name}(MB)"])
            simulated_mb = (simulated or 0) / _MB
            errors[name].append(abs(simulated_mb - measured) / measured)
            figures.append(f"{measured:9,.0f} {simulated_mb:9,.0f}")
        print(f"{row['model']:28} {row['experiment']:9} {size:5}  {'  '.join(figures)}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(rows)} of {count} rows in {seconds:.0f} s; MB = 1e6 bytes")
    for name, values in errors.items():
        print(f"{name:9} median error {median(values):.2%}, p90 {quantiles(values, n=10)[-1]:.2%}")


@cache
def _simulated(name: str, size: int, length: int, new_tokens: int | None) -> Measurement:
    """Simulate one forward pass, or a generation, in half precision on the device of the rows."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **_SIZES[name]}), encoding="utf-8")
        target = parse_target(f"hf:{path}")
        job = build_job(BuildRequest(target=target, inputs=(str(length),), packed=True))
    job.steps = 1
    network: Any = job.module
    network.subject.lm_head.register_forward_hook(_as_fp32)
    options: dict[str, Any] = {"batch_size": size, "dtype": "fp16", "mode": "inference"}
    if new_tokens is not None:
        options |= {"mode": "generate", "new_tokens": new_tokens}
    with _old_caches():
        peaks = Simulator(job).simulate(options, [load_profile("a100_80gb")]).peaks["a100_80gb"]
    return peaks.unbounded if peaks.unbounded and peaks.bounded.status is Status.OOM else peaks.bounded


@contextmanager
def _old_caches() -> Iterator[None]:
    """Hold the cache of each layer from before a step until the step is over, as release 4.35 does."""
    layers: Any = cache_utils.DynamicLayer
    update, mixin = layers.update, GenerationMixin
    end_of_step: Any = mixin._update_model_kwargs_for_generation
    held: list[Any] = []

    def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
        held.append((self.keys, self.values))
        return update(self, *args, **kwargs)

    def ended(self: Any, *args: Any, **kwargs: Any) -> Any:
        held.clear()
        return end_of_step(self, *args, **kwargs)

    layers.update, mixin._update_model_kwargs_for_generation = updated, ended
    try:
        yield
    finally:
        layers.update, mixin._update_model_kwargs_for_generation = update, end_of_step


def _as_fp32(_module: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
    return logits.float()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
