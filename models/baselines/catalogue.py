"""All baselines by name, fitted together."""

from collections.abc import Collection, Mapping, Sequence

from vramcast.models.baselines._base import Baseline
from vramcast.models.baselines._formula import Formula
from vramcast.models.baselines.extra_trees import ExtraTrees
from vramcast.models.baselines.fake_tensor import FakeTensor
from vramcast.models.baselines.gap import DirectPolynomial, Gap
from vramcast.models.baselines.horus import Horus
from vramcast.models.baselines.majority import Majority
from vramcast.models.baselines.scheduled import Scheduled
from vramcast.models.baselines.shape_inference import ShapeInference
from vramcast.models.baselines.virtual import Virtual
from vramcast.models.baselines.weights import Weights
from vramcast.models.example import Example

BASELINES: Mapping[str, type[Baseline]] = {
    kind.name: kind
    for kind in (
        Majority, Weights, ShapeInference, Horus, FakeTensor, DirectPolynomial, Gap, ExtraTrees, Scheduled, Virtual,
    )
}  # fmt: skip
FORMULAS: Mapping[str, Baseline] = {name: kind() for name, kind in BASELINES.items() if issubclass(kind, Formula)}
"""Baselines that need no fitting."""


def fit_baselines(
    train: Sequence[Example], validation: Sequence[Example], without: Collection[str] = ()
) -> dict[str, Baseline]:
    """Fit the baselines to the examples of the estimator that they are compared with."""
    return {name: kind().fit(train, validation) for name, kind in BASELINES.items() if name not in without}
