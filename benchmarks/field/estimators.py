"""The compared estimators: how each is made, and which inputs an estimate needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.field.published import EDGES_MIB, read_published
from benchmarks.field.rows import UNIVERSAL, UNSEEN_2024, Field, unseen_table
from benchmarks.field.tracked import Tracked
from vramcast.models.baselines._formula import Formula
from vramcast.models.baselines.extra_trees import ExtraTrees
from vramcast.models.baselines.fake_tensor import FakeTensor
from vramcast.models.baselines.fake_tensor import read_published as read_fake_tensor
from vramcast.models.baselines.gap import Gap
from vramcast.models.baselines.horus import Horus
from vramcast.models.baselines.majority import Majority
from vramcast.models.baselines.shape_inference import ShapeInference
from vramcast.models.baselines.virtual import Virtual
from vramcast.models.baselines.weights import Weights
from vramcast.models.checkpoint import load_checkpoint
from vramcast.models.estimators._base import Estimator
from vramcast.models.estimators.classifiers import NetworkClassifier, NetworkSettings
from vramcast.models.estimators.fitting import PlainFitter
from vramcast.models.example import Example
from vramcast.models.released import RELEASED

RISK = 0.01
TRAINED, CALIBRATED = "for its training rows", "for its calibration rows"
TABLE, TRACE, FAKE, TRACKED = "table", "trace", "fake", "tracked"
"""Inputs whose time counts towards an estimate: a layer table, a trace and its replay, a pass under another mode."""
_FITTERS = {
    "mlp": PlainFitter(epochs=60, patience=15, batch_size=128),
    "transformer": PlainFitter(epochs=10, patience=5, batch_size=128),
}
"""Shorter than a release: one network of each kind, not an ensemble."""


class SafeBucket(Formula):
    """The safe bound of an estimator, as an estimator."""

    name = "safe"

    def __init__(self, bounded: Estimator, risk: float = RISK) -> None:
        self.bounded = bounded
        self.risk = risk

    def used_bytes(self, example: Example) -> float:
        return float(self.figures_bytes([example])[0])

    def figures_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """Predict all examples in one batch, a hundred times faster than one by one."""
        safe_bytes = self.bounded.safe_bytes(examples, self.risk)
        if safe_bytes is None:
            raise TypeError(f"expected an estimator with calibrated bounds in {UNIVERSAL}, found none")
        return safe_bytes


@dataclass(frozen=True)
class Entry:
    """One estimator of the comparison."""

    title: str
    group: str
    figure: str
    estimator: Estimator
    takes: tuple[str, ...] = (TABLE,)
    needs_gpu: str = "no"
    supported: frozenset[str] | None = None
    """Ids of the specs that it supports; None for all."""
    only: str | None = None
    """The part of the rows that it belongs to; None for all."""
    narrowest_mib: int = 0


def unfitted() -> list[Entry]:
    """Return the estimators that are fitted here."""
    ours, learned = (TABLE, TRACE), "simulated, then learned"
    networks = {
        name: NetworkClassifier(NetworkSettings(network=name, bucket_mib=1000), fitter)
        for name, fitter in _FITTERS.items()
    }
    published = NetworkClassifier(NetworkSettings(features="gpumemnet", bucket_mib=1000), _FITTERS["mlp"])
    return [
        Entry("gap regressor (TBEM)", "ours", "computed, then learned", Gap(), needs_gpu=TRAINED),
        Entry("MLP classifier", "ours", learned, networks["mlp"], ours, TRAINED),
        Entry("Transformer classifier", "ours", learned, networks["transformer"], ours, TRAINED),
        Entry("MLP on GPUMemNet's features", "field", "learned", published, needs_gpu=TRAINED),
        Entry("ExtraTrees", "field", "learned", ExtraTrees(), needs_gpu=TRAINED),
        Entry("majority", "field", "learned", Majority(), (), TRAINED),
    ]


def fit_all(entries: Sequence[Entry], train: Sequence[Example], validation: Sequence[Example]) -> list[Entry]:
    """Fit all estimators to the same rows."""
    for entry in (bar := tqdm(entries, desc="fitting", unit="estimator")):
        bar.set_postfix_str(entry.title)
        entry.estimator.fit(train, validation)
    return list(entries)


def ready(data: Path, tracked_mib: dict[str, float]) -> list[Entry]:
    """Return the estimators that need no fitting: formulas, the released checkpoint, published estimates."""
    universal = load_checkpoint(RELEASED / UNIVERSAL)
    fake = FakeTensor(
        {key: size for path in sorted(data.rglob("timm_*.csv")) for key, size in read_fake_tensor(path).items()}
    )
    tracked = frozenset(tracked_mib)
    return [
        Entry("virtual GPU alone", "ours", "simulated", Virtual(), (TRACE,)),
        Entry("universal", "ours", "simulated", universal, (TRACE,), CALIBRATED),
        Entry("universal, safe bucket at 1 %", "ours", "simulated", SafeBucket(universal), (TRACE,), CALIBRATED),
        Entry("Horus", "field", "computed", Horus()),
        Entry("FakeTensor", "field", "published for timm, else computed", fake, (FAKE,)),
        Entry("PyTorch's MemTracker", "field", "computed", Tracked(tracked_mib), (TRACKED,), supported=tracked),
        Entry("shape formula of the talk", "field", "computed", ShapeInference()),
        Entry("weights x 4 (accelerate)", "field", "computed", Weights()),
        *_published(data),
    ]


def _published(data: Path) -> list[Entry]:
    return [
        Entry(
            f"{name} (published)", "published", "published", column, (),
            "for its layer summary" if name in EDGES_MIB else "no",
            frozenset(column.mib_by_id), UNSEEN_2024, EDGES_MIB.get(name, 0),
        )
        for name, column in read_published(unseen_table(data)).items()
    ]  # fmt: skip


ORDER = (
    "virtual GPU alone", "gap regressor (TBEM)", "MLP classifier", "Transformer classifier", "universal",
    "universal, safe bucket at 1 %", "Horus", "FakeTensor", "PyTorch's MemTracker", "shape formula of the talk",
    "weights x 4 (accelerate)", "MLP on GPUMemNet's features", "ExtraTrees", "majority",
)  # fmt: skip
"""The order of the tables; published estimates come last."""


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: ORDER.index(entry.title) if entry.title in ORDER else len(ORDER))


def supported_by(entry: Entry, field: Field) -> NDArray[np.bool_]:
    """Return a mask [rows] of the test rows that an estimator supports."""
    return np.array(
        [
            (entry.supported is None or item.spec.id in entry.supported)
            and (entry.only is None or entry.only in item.parts)
            for item in field.tested
        ]
    )
