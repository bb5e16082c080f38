"""All baselines by name: fitted together, kept together."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from models._base import Estimator
from models.baselines.extra_trees import ExtraTrees
from models.baselines.fake_tensor import FakeTensor
from models.baselines.gap import DirectPolynomial, Gap
from models.baselines.horus import Horus
from models.baselines.majority import Majority
from models.baselines.shape_inference import ShapeInference
from models.baselines.virtual import Virtual
from models.baselines.weights import Weights
from models.example import Example

BASELINES: Mapping[str, type[Estimator]] = {
    kind.name: kind
    for kind in (
        Majority, Weights, ShapeInference, Horus, FakeTensor, DirectPolynomial, Gap, ExtraTrees, Virtual,
    )
}  # fmt: skip


def fit_baselines(train: Sequence[Example], validation: Sequence[Example]) -> dict[str, Estimator]:
    """Every baseline, fitted to the same examples as the estimator that it is held against."""
    return {name: kind().fit(train, validation) for name, kind in BASELINES.items()}


def save_baselines(baselines: Mapping[str, Estimator], directory: Path) -> None:
    """Write each baseline into a directory of its name."""
    for name, estimator in baselines.items():
        estimator.save(directory / name)


def load_baselines(directory: Path) -> dict[str, Estimator]:
    """Read all that `save_baselines` wrote."""
    return {name: kind.load(directory / name) for name, kind in BASELINES.items()}
