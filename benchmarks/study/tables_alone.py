"""Estimates from layer tables alone, on the test rows of a run: `python -m benchmarks.study.tables_alone --run DIR`.

The run is one of `vramcast train data.tables=true`, whose test rows have architectures that no training row has. Beside
its estimator stand the schedule alone, and the published form of GPUMemNet on the same training rows: its features,
classes and cross entropy.
"""

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.page import show
from benchmarks.study.style import markdown
from vramcast.dataset_builder.store.splits import Split
from vramcast.models.baselines.scheduled import Scheduled
from vramcast.models.buckets import Buckets
from vramcast.models.checkpoint import load_checkpoint
from vramcast.models.comparison import predicted_rows
from vramcast.models.estimators._base import Estimator
from vramcast.models.estimators.encoding import ExampleEncoder
from vramcast.models.example import Example
from vramcast.models.metrics import Score, score
from vramcast.train.configuration import read_configuration
from vramcast.train.data import VIRTUAL
from vramcast.train.experiment import Parts, examples_for, parts_of
from vramcast.train.tasks.fit import CHECKPOINT, SPLIT
from vramcast.virtual_gpu.allocator.sizes import MIB

MAKER = "study.tables_alone"
RISK = 0.01
HEAD = ("rows", "n", "estimator", "bucket right", "median error", "mean", "p95", "safe too low", "mean reserve")
_EPOCHS, _ROWS, _RATE, _DROPOUT = 60, 128, 1e-3, 0.1
_WIDTHS = (128, 64, 32)
"""Hidden layers of the published MLP form."""


class PublishedForm:
    """GPUMemNet's form: an MLP from its features to one class for each bucket, trained by cross entropy."""

    def __init__(self, buckets: Buckets, seed: int = 0) -> None:
        self.buckets = buckets
        self.seed = seed

    encoder_: ExampleEncoder
    network_: nn.Module

    def fit(self, train: Sequence[Example]) -> "PublishedForm":
        """Learn the classes of the training rows."""
        self.encoder_ = ExampleEncoder.fit(train, "gpumemnet")
        x, y = self._inputs(train), torch.from_numpy(classes_of(train, self.buckets))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network_ = _classifier(x.shape[1], self.buckets.classes)
            optimizer = torch.optim.AdamW(self.network_.parameters(), _RATE)
            for _ in range(_EPOCHS):
                for rows in torch.randperm(len(x)).split(_ROWS):
                    optimizer.zero_grad()
                    torch.autograd.backward(nn.functional.cross_entropy(self.network_(x[rows]), y[rows]))
                    optimizer.step()
        self.network_.eval()
        return self

    def accuracy(self, examples: Sequence[Example]) -> float:
        """Return the share of rows in the predicted class."""
        with torch.inference_mode():
            predicted = self.network_(self._inputs(examples)).argmax(1).numpy()
        return float(np.mean(predicted == classes_of(examples, self.buckets)))

    def _inputs(self, examples: Sequence[Example]) -> torch.Tensor:
        return self.encoder_.inputs(examples, with_tokens=False).vector


def _classifier(inputs: int, classes: int) -> nn.Module:
    widths = (inputs, *_WIDTHS)
    layers = [
        part
        for before, after in pairwise(widths)
        for part in (nn.Linear(before, after), nn.ReLU(), nn.Dropout(_DROPOUT))
    ]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def classes_of(examples: Sequence[Example], buckets: Buckets) -> NDArray[np.int64]:
    """Return [n]: the classes of labels."""
    labels = [example.measured for example in examples]
    return buckets.of(np.array([label.used_bytes if label.fits else np.inf for label in labels]))


def groups_of(examples: Sequence[Example]) -> Iterator[tuple[str, int, list[Example]]]:
    """Yield groups of test rows with the width of their buckets in MiB: measured ones, then simulated ones."""
    measured = [example for example in examples if example.backend != VIRTUAL]
    simulated = [example for example in examples if example.backend == VIRTUAL]
    for family in sorted({example.family for example in measured}):
        width = 1000 if family == "mlp" else 8000
        yield f"{family}, measured", width, [example for example in measured if example.family == family]
    for family in sorted({example.family for example in simulated}):
        yield f"{family}, simulated", 8000, [example for example in simulated if example.family == family]
    yield "all simulated", 8000, simulated


def lines(parts: Parts, estimators: dict[str, Estimator]) -> Iterator[list[str]]:
    """Yield the lines of the table."""
    published: dict[int, PublishedForm] = {}
    for title, width, examples in groups_of(parts.test):
        if not examples:
            continue
        buckets = Buckets(width * MIB, max(example.capacity_bytes for example in examples))
        for name, estimator in estimators.items():
            yield [title, str(len(examples)), name, *_figures(_score(estimator, examples, buckets))]
        if width not in published:
            all_of_them = [*parts.train, *parts.validation]
            largest = Buckets(width * MIB, max(example.capacity_bytes for example in all_of_them))
            published[width] = PublishedForm(largest).fit(all_of_them)
        accuracy = published[width].accuracy(examples)
        yield [title, str(len(examples)), "published form", f"{accuracy:.3f}", *["-"] * 5]


def _score(estimator: Estimator, examples: Sequence[Example], buckets: Buckets) -> Score:
    return score(predicted_rows(estimator, examples, buckets, estimator.safe_bytes(examples, RISK)))


def _figures(figures: Score) -> list[str]:
    bounded = figures.safe_too_low is not None
    reserve = f"{(figures.over_reservation_mib or 0) / 1024:.2f} GiB" if bounded else "-"
    errors = (figures.median_relative_error, figures.mean_relative_error, figures.p95_relative_error)
    return [f"{figures.accuracy or 0:.3f}", *map(_percent, errors), _percent(figures.safe_too_low), reserve]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def parts_of_run(directory: Path) -> Parts:
    """Return the examples of a run, as it split them."""
    examples = examples_for(read_configuration(directory / "config.yaml"))
    return parts_of(examples, Split.load(directory / SPLIT))


def main() -> None:
    """Print the table, and write it into a page."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the directory of a run")
    parser.add_argument("--page", type=Path, help="write the table into the marked part of this page")
    arguments = parser.parse_args()
    parts = parts_of_run(arguments.run)
    estimators = {"schedule alone": Scheduled(), "learned": load_checkpoint(arguments.run / CHECKPOINT)}
    show(arguments.page, MAKER, "table", markdown(HEAD, list(lines(parts, estimators))))


if __name__ == "__main__":
    main()
