"""The released kind of estimator: several classifiers, each calibrated on jobs that it was not trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vramcast.errors import UserError, check_count
from vramcast.models.estimators._base import Prediction
from vramcast.models.estimators.batch import Inputs
from vramcast.models.estimators.bounded_forecast import BoundedForecast
from vramcast.models.estimators.classifiers import Encoded, Fitter, NetworkClassifier, NetworkSettings
from vramcast.models.estimators.conformal import SafeMargins, relative, score
from vramcast.models.estimators.forecast import Forecast
from vramcast.models.estimators.forecaster import Forecaster
from vramcast.models.estimators.labels import intervals
from vramcast.models.example import Example
from vramcast.models.features import feature_set
from vramcast.models.novelty import Novelty, are_ranks
from vramcast.models.outlook import own_bytes_of
from vramcast.models.storage import State, joined

_TEMPERATURES = tuple(float(value) for value in np.geomspace(0.5, 3.0, 37))
_LEAST_FOLDS = 5
"""A member is calibrated on at most a fifth of the examples and fitted to at least seven tenths."""
_ODD = 0.02
"""Share of the least likely calibration examples that the width ignores: one outlier would set it."""


@dataclass(frozen=True)
class Round:
    """The use of each example when one member is fitted, as indices [n] of the examples."""

    train: Tensor
    validation: Tensor
    calibration: Tensor


def rounds_of(groups: Sequence[str], count: int, seed: int) -> list[Round]:
    """Return a round for each of `count` members. Groups stay together, and no two members calibrate on the same rows.

    Each member is calibrated on a fold of its own; its epoch is chosen on half of the next fold.
    """
    from vramcast.dataset_builder.store.splits import make_folds, make_split  # noqa: PLC0415 - answers need no splits

    folds = list(make_folds(groups, max(count, _LEAST_FOLDS), seed).parts.values())
    rounds = []
    for own, following in list(zip(folds, [*folds[1:], folds[0]], strict=True))[:count]:
        halves = make_split(following, {"validation": 0.5, "train": 0.5}, seed)
        part = dict.fromkeys(own, "calibration") | dict.fromkeys(halves.parts["validation"], "validation")
        uses = [part.get(group, "train") for group in groups]
        rounds.append(Round(**{use: _places(uses, use) for use in ("train", "validation", "calibration")}))
    return rounds


def _places(uses: Sequence[str], wanted: str) -> Tensor:
    return torch.tensor([place for place, use in enumerate(uses) if use == wanted])


class Ensemble(Forecaster):
    """Classifiers with different seeds and training rows, whose forecasts are averaged."""

    kind: ClassVar[str] = "ensemble"

    def __init__(self, members: Sequence[NetworkClassifier]) -> None:
        if not members:
            raise UserError("expected one member of an ensemble or more, found none: add some")
        self.members = tuple(members)
        self.name = members[0].name

    novelty_: Novelty
    temperature_: float
    margins_: SafeMargins
    """Scores above the median; and below, above the reference that the forecasts start from."""
    usual_margins_: SafeMargins

    @classmethod
    def of(cls, settings: NetworkSettings, size: int, fitter: Fitter | None = None) -> Self:
        """Return an ensemble of equal members with consecutive seeds."""
        check_count("the ensemble's size", size)
        makes = (replace(settings, seed=settings.seed + index) for index in range(size))
        return cls([NetworkClassifier(make, fitter) for make in makes])

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Fit each member to all examples but a part of its own, and calibrate it on that part.

        With five members or more, most members learn from every row, and every row calibrates a member that has seen no
        network of the same design. The reference has one fitted number, the usual gap, so all rows calibrate it.
        """
        examples = [*train, *validation]
        encoded: dict[tuple[str, bool, int], Encoded] = {}
        forecasts: list[Forecast] = []
        calibrated_on: list[Example] = []
        rounds = rounds_of([example.design for example in examples], len(self.members), self._seed)
        for member, parts in zip(self.members, rounds, strict=True):
            key = member.settings.encoding
            if key not in encoded:
                encoded[key] = Encoded.of(member.settings, examples)
            data = encoded[key]
            member.fit_prepared(data.parted(parts.train, parts.validation))
            own = [examples[place] for place in parts.calibration.tolist()]
            forecasts.append(member.forecast_inputs(data.rows.inputs.select(parts.calibration), own))
            calibrated_on += own
        self.novelty_ = self._novelty(examples, rounds[0])
        self.usual_margins_ = _margins(examples, self._usual_bytes(examples))
        return self._calibrate(Forecast.stacked(forecasts), calibrated_on)

    @property
    def _seed(self) -> int:
        return self.members[0].settings.seed

    def _novelty(self, examples: Sequence[Example], parts: "Round") -> Novelty:
        """Learn the distance from which a job is unfamiliar, with the rows of the first member."""
        matrix = self.members[0].encoder_.matrix(examples)
        apart = torch.cat([parts.validation, parts.calibration])
        return Novelty.fit(matrix[parts.train.numpy()], matrix[apart.numpy()], self._seed)

    def _calibrate(self, plain: Forecast, examples: Sequence[Example]) -> Self:
        """Set width and safe margins by forecasts of examples that the members were not fitted to."""
        self.temperature_ = best_temperature(plain, examples)
        self.margins_ = _margins(examples, plain.own_quantile_bytes(0.5))
        return self

    def _usual_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """Return [examples]: the reference of the members, corrected by the usual gap."""
        first = self.members[0]
        reference = feature_set(first.settings.features).reference_bytes
        return math.exp(first.center_) * np.array([max(reference(example), 1) for example in examples])

    def forecast(self, examples: Sequence[Example]) -> Forecast:
        """Return the average of the members' distributions.

        The forecast of an unfamiliar job is centred on the reference instead, as wide as the errors of references.
        """
        return self._forecast(examples, self.unfamiliar(examples))

    def _forecast(self, examples: Sequence[Example], strange: NDArray[np.bool_]) -> Forecast:
        forecast = self._plain_forecast(examples).tempered(self.temperature_)
        if not strange.any():
            return forecast
        usual = self._usual_bytes(examples)
        scales = self.usual_margins_.scales([example.stratum for example in examples])
        return forecast.recentred(strange, usual.tolist(), relative(scales, usual))

    def _plain_forecast(self, examples: Sequence[Example]) -> Forecast:
        """Average the members; those with one encoder share the encoding, which takes most of the time."""
        encoded: dict[tuple[int, bool], Inputs] = {}
        forecasts = []
        for member in self.members:
            key = (id(member.encoder_), member.settings.reads_tokens)
            if key not in encoded:
                encoded[key] = member.encoder_.inputs(examples, member.settings.reads_tokens)
            forecasts.append(member.forecast_inputs(encoded[key], examples))
        return Forecast.mixed(forecasts)

    def unfamiliar(self, examples: Sequence[Example]) -> NDArray[np.bool_]:
        """Return [examples]: true for jobs unlike the training set."""
        return np.asarray(self.novelty_.flags(self.members[0].encoder_.matrix(examples)) | are_ranks(examples))

    def safe_bytes(self, examples: Sequence[Example], risk: float) -> NDArray[np.float64]:
        """Return [examples]: bounds that a job exceeds with at most this probability; infinity if they do not fit.

        The margin is that of the calibration jobs of the stratum above their medians, or for an unfamiliar job above
        their references.
        """
        return self._outlook(examples, risk, self.unfamiliar(examples)).on_device(1 - risk)

    def predict_all(self, examples: Sequence[Example], risk: float) -> Prediction:
        """Return point estimates, bounds and distributions, all from one outlook and one pass of the networks."""
        strange = self.unfamiliar(examples)
        return Prediction.of_outlook(self._outlook(examples, risk, strange), risk, strange)

    def _outlook(self, examples: Sequence[Example], risk: float, strange: NDArray[np.bool_]) -> BoundedForecast:
        scores = [
            (self.usual_margins_ if odd else self.margins_).chosen(example.stratum, risk)
            for example, odd in zip(examples, strange, strict=True)
        ]
        return BoundedForecast.of(self._forecast(examples, strange), scores)

    @property
    def needs_simulation(self) -> bool:
        """Whether the members' features need a simulated measurement."""
        return self.members[0].needs_simulation

    @property
    def least_risk(self) -> float:
        """The smallest risk that the number of calibration rows supports."""
        return self.margins_.least_risk

    def state(self) -> State:
        """Return the states of the members, and what they share."""
        scores_by_use = {"scores": self.margins_.scores, "gaps": self.usual_margins_.scores}
        arrays = {
            f"{name}.{stratum}": value for name, scores in scores_by_use.items() for stratum, value in scores.items()
        }
        shared = State(
            {
                "members": len(self.members),
                "temperature": self.temperature_,
                "threshold": self.novelty_.threshold,
                "strata": {name: list(scores) for name, scores in scores_by_use.items()},
            },
            {"reference": self.novelty_.reference, **arrays},
        )
        return joined({"shared": shared} | {_part(index): item.state() for index, item in enumerate(self.members)})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Restore an ensemble from its state."""
        shared = state.part("shared")
        count = shared.settings["members"]
        ensemble = cls([NetworkClassifier.from_state(state.part(_part(index))) for index in range(count)])
        encoders = [member.encoder_ for member in ensemble.members]
        for member in ensemble.members:
            member.encoder_ = next(item for item in encoders if item == member.encoder_)
        ensemble.temperature_ = shared.settings["temperature"]
        ensemble.novelty_ = Novelty(shared.arrays["reference"], shared.settings["threshold"])
        margins = {
            name: SafeMargins({stratum: shared.arrays[f"{name}.{stratum}"] for stratum in strata})
            for name, strata in shared.settings["strata"].items()
        }
        ensemble.margins_, ensemble.usual_margins_ = margins["scores"], margins["gaps"]
        return ensemble


def best_temperature(plain: Forecast, examples: Sequence[Example]) -> float:
    """Return the temperature with the largest likelihood of all but the least likely examples."""
    bounds, odd = intervals(examples), int(_ODD * len(examples))

    def likelihood(temperature: float) -> float:
        return float(np.sort(plain.tempered(temperature).log_likelihood(*bounds))[odd:].mean())

    return max(_TEMPERATURES, key=likelihood)


def _part(index: int) -> str:
    return f"member{index}"


def _margins(examples: Sequence[Example], estimated_bytes: NDArray[np.float64]) -> SafeMargins:
    """Return margins by stratum; a score counts in all strata that its example calibrates."""
    scores = score(own_bytes_of(examples), estimated_bytes)
    strata = [(name, value) for example, value in zip(examples, scores, strict=True) for name in example.calibrates]
    return SafeMargins.fit([name for name, _ in strata], [value for _, value in strata])
