"""One experiment, whichever task it is part of: parts of the data, members that are fitted, and what they are worth."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from vramcast.dataset_builder.configuration import executor_of
from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.dataset_builder.measure.static import StaticBackend
from vramcast.dataset_builder.store.splits import Split, make_split
from vramcast.errors import UserError
from vramcast.models._base import Estimator
from vramcast.models.baselines.catalogue import BASELINES
from vramcast.models.buckets import Buckets
from vramcast.models.comparison import EstimatorReport, compare
from vramcast.models.ensemble import Ensemble
from vramcast.models.example import Example
from vramcast.train.configuration import Configuration
from vramcast.train.data import VIRTUAL, load_examples
from vramcast.train.fitting import LightningFitter

ESTIMATOR = "this run"


@dataclass(frozen=True)
class Parts:
    """Examples by what they are for."""

    train: Sequence[Example]
    validation: Sequence[Example]
    """The degree of a polynomial is chosen on these; an ensemble parts both anew for each of its members."""
    test: Sequence[Example]

    def describe(self) -> str:
        """Rows by part."""
        return ", ".join(f"{item.name} {len(getattr(self, item.name))}" for item in fields(self))


def examples_for(configuration: Configuration) -> list[Example]:
    """The examples of a configuration's data."""
    executor = executor_of(configuration.executor, StaticBackend())
    workers = executor.workers if isinstance(executor, LocalExecutor) else len(os.sched_getaffinity(0))
    return load_examples(configuration.data, executor, workers)


def load_parts(configuration: Configuration) -> Parts:
    """The examples of a configuration, split anew."""
    examples = examples_for(configuration)
    return parts_of(examples, split_of(examples, configuration))


def split_of(examples: Sequence[Example], configuration: Configuration) -> Split:
    """A split by configuration of the network, which the seed decides."""
    return make_split((example.group for example in examples), configuration.split, configuration.seed)


def parts_of(examples: Sequence[Example], split: Split) -> Parts:
    """The examples of each part of a split."""
    parts: dict[str, list[Example]] = {item.name: [] for item in fields(Parts)}
    for example in examples:
        parts[split.part_of(example.group)].append(example)
    return Parts(**parts)


def fit_estimator(configuration: Configuration, fitter: LightningFitter, parts: Parts) -> Ensemble:
    """Members that differ in their seeds and rows, each calibrated on rows that it did not see."""
    return Ensemble.of(configuration.network, configuration.members, fitter).fit(parts.train, parts.validation)


def evaluate(
    configuration: Configuration, estimator: Ensemble, parts: Parts, buckets: Buckets
) -> dict[str, EstimatorReport]:
    """The estimator and the baselines on the test rows, by name."""
    estimators: dict[str, Estimator] = {ESTIMATOR: estimator, **_baselines(parts)}
    safe = safe_bytes(estimator, parts.test, configuration.risk)
    return compare(estimators, parts.test, buckets, {} if safe is None else {ESTIMATOR: safe})


def safe_bytes(estimator: Ensemble, examples: Sequence[Example], risk: float) -> NDArray[np.float64] | None:
    """The bounds that are too low at that risk only; none where the calibration rows are too few for it."""
    try:
        return estimator.safe_bytes(examples, risk)
    except UserError as error:
        print(f"note: no safe buckets: {error}", file=sys.stderr)
        return None


def _baselines(parts: Parts) -> dict[str, Estimator]:
    """Fitted to the same rows. Against rows that are simulated the simulation would be held against itself."""
    told = {"fake_tensor", "virtual"} if all(example.backend == VIRTUAL for example in parts.test) else set()
    kinds = {name: kind for name, kind in BASELINES.items() if name not in told}
    return {name: kind().fit(parts.train, parts.validation) for name, kind in kinds.items()}
