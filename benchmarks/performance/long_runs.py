"""Coverage of long runs: `python -m benchmarks.performance.long_runs [--runs N] [--simulated N]`.

A script whose batches vary is stopped after 100 steps, and its safe figure is meant for 1,000. This counts how often
the figure covers them, for lengths of several distributions, with seeds that no constant was chosen on. The peak of a
step is that of a small network on the virtual GPU for the length of its batch; with `--simulated`, all 1,000 steps of
some runs are simulated, and the reserved memory is compared.
"""

import argparse
import bisect
import random
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from vramcast.commands.run.long_runs import LONG_RUN_STEPS, growth_factor, is_ordered
from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_SEEN = 100
_BATCH = 8
_LONGEST = 4096
_FIRST_SEED = 10_000
_KNOTS = (1, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, _LONGEST)
Lengths = Callable[[random.Random], list[int]]


def _clipped(length: float) -> int:
    return min(max(int(length), 1), _LONGEST)


def _padded(source: random.Random, draw: Callable[[], float]) -> list[int]:
    """Return the longest sample of each batch, to which the others are padded."""
    return [max(_clipped(draw()) for _ in range(_BATCH)) for _ in range(LONG_RUN_STEPS)]


def _uniform(source: random.Random) -> list[int]:
    return [source.randint(16, 1024) for _ in range(LONG_RUN_STEPS)]


def _lognormal(source: random.Random) -> list[int]:
    return _padded(source, lambda: source.lognormvariate(5, 0.5))


def _bimodal(source: random.Random) -> list[int]:
    return _padded(source, lambda: source.gauss(*((900, 60) if source.random() < 0.02 else (150, 40))))


def _grouped(source: random.Random) -> list[int]:
    """Return batches of samples of like length, in random order."""
    samples = sorted(_clipped(source.lognormvariate(5, 0.5)) for _ in range(LONG_RUN_STEPS * _BATCH))
    lengths = samples[_BATCH - 1 :: _BATCH]
    source.shuffle(lengths)
    return lengths


def _sorted(source: random.Random) -> list[int]:
    return sorted(_grouped(source))


DISTRIBUTIONS: dict[str, Lengths] = {
    "uniform": _uniform,
    "log-normal, padded to the longest": _lognormal,
    "bimodal, padded to the longest": _bimodal,
    "log-normal, grouped by length, shuffled": _grouped,
    "log-normal, sorted": _sorted,
}


class _Small(nn.Module):
    """An encoder whose attention is fused, or computes all scores."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embedding, self.projection, self.out = nn.Embedding(1000, 64), nn.Linear(64, 192), nn.Linear(64, 8)
        self.fused = fused

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        q, k, v = (
            item.unflatten(-1, (4, 16)).transpose(1, 2) for item in self.projection(self.embedding(tokens)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v
        scores: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2).mean(1))
        return scores


def _simulated(lengths: Sequence[int], fused: bool) -> CudaEmulation:
    """Train the small network on batches of these lengths."""
    with CudaEmulation(load_profile("h200"), options=AllocatorOptions(), unbounded=True) as gpu:
        network = _Small(fused).cuda()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for length in lengths:
            optimizer.zero_grad()
            network(torch.zeros(_BATCH, length, dtype=torch.long, device="cuda")).sum().backward()
            optimizer.step()
    return gpu


def _interpolated(knots: Sequence[int]) -> Callable[[int], int]:
    def peak_of(length: int) -> int:
        index = min(max(bisect.bisect_right(_KNOTS, length) - 1, 0), len(_KNOTS) - 2)
        share = (length - _KNOTS[index]) / (_KNOTS[index + 1] - _KNOTS[index])
        return int(knots[index] + share * (knots[index + 1] - knots[index]))

    return peak_of


def covered(peaks: Sequence[int], risk: float) -> tuple[bool, float, bool]:
    """Return whether the figure after 100 steps covers all, its ratio to their peak, and whether they are ordered."""
    seen = peaks[1:_SEEN]
    figure = growth_factor(seen, risk) * max(peaks[:_SEEN])
    return figure >= max(peaks), figure / max(peaks), is_ordered(seen)


def _reserved(lengths: Sequence[int], fused: bool, risk: float) -> tuple[float, int]:
    """Return the figure for the reserved memory after 100 steps, and that of all steps, by simulating them."""
    record = _simulated(lengths, fused).record
    seen = record.steps[:_SEEN]
    factor = growth_factor([step.peak.allocated_bytes for step in seen[1:]], risk)
    return factor * max(step.peak.reserved_bytes for step in seen), record.peak.reserved_bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each distribution and network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help="seeds for each row")
    parser.add_argument("--simulated", type=int, default=0, help="seeds whose 1,000 steps are simulated one by one")
    parser.add_argument("--risk", type=float, default=0.01)
    options = parser.parse_args(argv)
    print(f"| lengths | attention | covered, risk {options.risk:g} | figure / peak, median | found to be ordered |")
    print("| --- | --- | --- | --- | --- |")
    for fused in (True, False):
        steps = _simulated([_KNOTS[0], *_KNOTS], fused).record.steps[1:]
        peak_of = _interpolated([step.peak.allocated_bytes for step in steps])
        for name, draw in DISTRIBUTIONS.items():
            seeds = range(_FIRST_SEED, _FIRST_SEED + options.runs)
            runs = [covered([peak_of(item) for item in draw(random.Random(seed))], options.risk) for seed in seeds]
            share = sum(item[0] for item in runs) / len(runs)
            ordered = sum(item[2] for item in runs) / len(runs)
            ratio = median(item[1] for item in runs)
            print(f"| {name} | {'fused' if fused else 'all scores'} | {share:.1%} | {ratio:.2f} | {ordered:.0%} |")
            for seed in seeds[: options.simulated]:
                figure, reserved_bytes = _reserved(draw(random.Random(seed)), fused, options.risk)
                ratio = figure / reserved_bytes
                print(f"| seed {seed}, reserved | | {'covered' if ratio >= 1 else 'not covered'} | {ratio:.2f} | |")


if __name__ == "__main__":
    main()
