"""One experiment: parts of the data, a fitted estimator, and its evaluation beside the baselines."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from vramcast.dataset_builder.backends.static import StaticBackend
from vramcast.dataset_builder.configuration import executor_of
from vramcast.dataset_builder.executors import LocalExecutor
from vramcast.dataset_builder.store.splits import Split, make_split
from vramcast.errors import UserError
from vramcast.models.baselines.catalogue import BASELINES, fit_baselines
from vramcast.models.buckets import Buckets
from vramcast.models.comparison import EstimatorReport, compare
from vramcast.models.estimators._base import Estimator, SavedEstimator
from vramcast.models.estimators.calibrated_simulation import CalibratedSimulation
from vramcast.models.estimators.ensemble import Ensemble
from vramcast.models.example import Example
from vramcast.models.examples import without_details
from vramcast.train.configuration import Configuration
from vramcast.train.data import VIRTUAL, load_examples
from vramcast.train.fitting import LightningFitter

ESTIMATOR = "this run"


@dataclass(frozen=True)
class Parts:
    """Examples by their use."""

    train: Sequence[Example]
    validation: Sequence[Example]
    """The degree of a polynomial is chosen on these; an ensemble splits both again for each member."""
    test: Sequence[Example]

    def describe(self) -> str:
        """Return the number of rows by part."""
        return ", ".join(f"{item.name} {len(getattr(self, item.name))}" for item in fields(self))


def examples_for(configuration: Configuration) -> list[Example]:
    """Return the examples of a configuration's data."""
    executor = executor_of(configuration.executor, StaticBackend())
    workers = executor.workers if isinstance(executor, LocalExecutor) else len(os.sched_getaffinity(0))
    return load_examples(configuration.data, executor, workers)


def load_parts(configuration: Configuration) -> Parts:
    """Return the examples of a configuration, split into parts."""
    examples = examples_for(configuration)
    return parts_of(examples, split_of(examples, configuration))


def split_of(examples: Sequence[Example], configuration: Configuration) -> Split:
    """Split by configuration of the network, with the configured seed."""
    return make_split((example.group for example in examples), configuration.split, configuration.seed)


def parts_of(examples: Sequence[Example], split: Split) -> Parts:
    """Return the examples of each part of a split."""
    parts: dict[str, list[Example]] = {item.name: [] for item in fields(Parts)}
    for example in examples:
        parts[split.part_of(example.group)].append(example)
    return Parts(**parts)


def fit_estimator(configuration: Configuration, fitter: LightningFitter, parts: Parts) -> SavedEstimator:
    """Calibrate the simulation, or fit an ensemble whose members are each calibrated on rows that they did not see."""
    if not configuration.members:
        return CalibratedSimulation(configuration.seed).fit(parts.train, parts.validation)
    train = [*parts.train, *_plain(parts.train, configuration)]
    return Ensemble.of(configuration.network, configuration.members, fitter).fit(train, parts.validation)


def _plain(examples: Sequence[Example], configuration: Configuration) -> list[Example]:
    """Return some examples again with a table without details, drawn with the seed."""
    share = configuration.data.plain_share
    drawn = np.random.default_rng(configuration.seed).random(len(examples)) < share
    return [without_details(example) for example, chosen in zip(examples, drawn, strict=True) if chosen]


def evaluate(
    configuration: Configuration, estimator: Estimator, parts: Parts, buckets: Buckets
) -> dict[str, EstimatorReport]:
    """Evaluate the estimator and the baselines on the test rows, by name."""
    # on simulated rows, leave out the baselines that are the simulation itself
    simulated = {"fake_tensor", "virtual"} if all(example.backend == VIRTUAL for example in parts.test) else set()
    if configuration.data.tables:
        simulated |= {name for name, kind in BASELINES.items() if kind().needs_simulation}
    baselines = fit_baselines(parts.train, parts.validation, without=simulated)
    estimators: dict[str, Estimator] = {ESTIMATOR: estimator, **baselines}
    safe = safe_bytes(estimator, parts.test, configuration.risk)
    return compare(estimators, parts.test, buckets, {} if safe is None else {ESTIMATOR: safe})


def safe_bytes(estimator: Estimator, examples: Sequence[Example], risk: float) -> NDArray[np.float64] | None:
    """Return bounds at a risk, or None if there are too few calibration rows for it."""
    try:
        return estimator.safe_bytes(examples, risk)
    except UserError as error:
        print(f"note: no safe buckets: {error}", file=sys.stderr)
        return None
