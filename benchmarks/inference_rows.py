"""Compare public forward passes with their simulation: `python -m benchmarks.inference_rows --data DIR`.

DIR holds optimum_inference_a100.csv. The networks are built by the installed transformers with what the release of the
rows (4.35) did otherwise: it casts logits to fp32. Rows of GPTQ bases and of generation are counted and not simulated:
that release holds two whole caches while it generates, and its ExLlama kernels have buffers of their own.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from vramcast.commands.exit_codes import CommandParser, exit_code
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.building import build_job
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.measurement import Measurement

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
    start = time.perf_counter()
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    print(
        f"{'network':28} {'kind':9} {'batch':>5}  {'allocated':>9} {'simulated':>9}  {'reserved':>9} {'simulated':>9}"
    )
    for row in comparable:
        size, length = (int(row[f"benchmark.input_shapes.{name}"]) for name in ("batch_size", "sequence_length"))
        peak = _forward(row["model"], size, length)
        figures = []
        for name, simulated in (("allocated", peak.allocated_bytes), ("reserved", peak.reserved_bytes)):
            measured = float(row[f"forward.max_memory_{name}(MB)"])
            simulated_mb = (simulated or 0) / _MB
            errors[name].append(abs(simulated_mb - measured) / measured)
            figures.append(f"{measured:9,.0f} {simulated_mb:9,.0f}")
        print(f"{row['model']:28} {row['experiment']:9} {size:5}  {'  '.join(figures)}")
    seconds = time.perf_counter() - start
    print(f"{len(comparable)} of {len(rows)} rows, forward passes alone, in {seconds:.0f} s; MB = 1e6 bytes")
    for name, values in errors.items():
        print(f"{name:9} median error {median(values):.2%}, p90 {quantiles(values, n=10)[-1]:.2%}")


@cache
def _forward(name: str, size: int, length: int) -> Measurement:
    """Simulate one forward pass in half precision on the device of the rows."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **_SIZES[name]}), encoding="utf-8")
        target = parse_target(f"hf:{path}")
        job = build_job(BuildRequest(target=target, inputs=(str(length),), packed=True))
    job.steps = 1
    network: Any = job.module
    network.subject.lm_head.register_forward_hook(_as_fp32)
    options = {"batch_size": size, "dtype": "fp16", "mode": "inference"}
    peaks = Simulator(job).simulate(options, [load_profile("a100_80gb")]).peaks["a100_80gb"]
    return peaks.unbounded or peaks.bounded


def _as_fp32(_module: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
    return logits.float()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
