"""All baselines by name: fitted together, kept together."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dataset_builder.errors import check_choice
from models.baselines._formula import Formula
from models.baselines._kept import Baseline
from models.baselines.extra_trees import ExtraTrees
from models.baselines.fake_tensor import FakeTensor
from models.baselines.gap import DirectPolynomial, Gap
from models.baselines.horus import Horus
from models.baselines.majority import Majority
from models.baselines.shape_inference import ShapeInference
from models.baselines.virtual import Virtual
from models.baselines.weights import Weights
from models.example import Example
from models.storage import joined, read_state, write_state

BASELINES: Mapping[str, type[Baseline]] = {
    kind.name: kind
    for kind in (
        Majority, Weights, ShapeInference, Horus, FakeTensor, DirectPolynomial, Gap, ExtraTrees, Virtual,
    )
}  # fmt: skip
FORMULAS: Mapping[str, Baseline] = {name: kind() for name, kind in BASELINES.items() if issubclass(kind, Formula)}
"""Those that need no fitting."""
_KIND = "baselines"


def fit_baselines(train: Sequence[Example], validation: Sequence[Example]) -> dict[str, Baseline]:
    """Every baseline, fitted to the same examples as the estimator that it is held against."""
    return {name: kind().fit(train, validation) for name, kind in BASELINES.items()}


def save_baselines(baselines: Mapping[str, Baseline], directory: Path) -> None:
    """Write baselines into one directory."""
    write_state(directory, _KIND, joined({name: baseline.state() for name, baseline in baselines.items()}))


def load_baselines(directory: Path) -> dict[str, Baseline]:
    """Read all that `save_baselines` wrote."""
    state = read_state(directory, _KIND)
    return {name: _kind(name).from_state(state.part(name)) for name in state.settings}


def _kind(name: str) -> type[Baseline]:
    check_choice("a baseline", name, BASELINES)
    return BASELINES[name]
