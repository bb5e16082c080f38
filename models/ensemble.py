"""Several classifiers as one, each calibrated on jobs that it has not seen; the estimator that is shipped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vramcast.dataset_builder.store.splits import make_folds, make_split
from vramcast.errors import UserError, check_count
from vramcast.models._base import Prediction
from vramcast.models.batch import Inputs
from vramcast.models.buckets import Buckets
from vramcast.models.classifiers import Encoded, Fitter, NetworkClassifier, NetworkSettings
from vramcast.models.conformal import SafeMargins, raised, relative, score
from vramcast.models.example import Example
from vramcast.models.features import feature_set
from vramcast.models.forecast import Forecast
from vramcast.models.forecaster import Forecaster
from vramcast.models.labels import intervals
from vramcast.models.ood import Novelty
from vramcast.models.storage import State, joined

_TEMPERATURES = tuple(float(value) for value in np.geomspace(0.5, 3.0, 37))
_LEAST_FOLDS = 5
"""A member is calibrated on about a fifth of the examples or less, and fitted to about seven tenths or more."""
_ODD = 0.02
"""The share of calibration examples, the least likely ones, without a say in the width: one odd row would set it."""


@dataclass(frozen=True)
class Round:
    """What each example is for when one member is fitted: places [n] in the list of examples."""

    train: Tensor
    validation: Tensor
    calibration: Tensor


def rounds_of(groups: Sequence[str], count: int, seed: int) -> list[Round]:
    """A round for each of `count` members. No two calibrate on the same rows, and no group is parted.

    Each member is calibrated on a fold of its own; half of the next fold, which is another's, chooses its epoch.
    """
    folds = list(make_folds(groups, max(count, _LEAST_FOLDS), seed).parts.values())
    found = []
    for own, following in list(zip(folds, [*folds[1:], folds[0]], strict=True))[:count]:
        halves = make_split(following, {"validation": 0.5, "train": 0.5}, seed)
        part = dict.fromkeys(own, "calibration") | dict.fromkeys(halves.parts["validation"], "validation")
        uses = [part.get(group, "train") for group in groups]
        found.append(Round(**{use: _places(uses, use) for use in ("train", "validation", "calibration")}))
    return found


def _places(uses: Sequence[str], wanted: str) -> Tensor:
    return torch.tensor([place for place, use in enumerate(uses) if use == wanted])


class Ensemble(Forecaster):
    """Members with seeds and training rows of their own; what they say is averaged."""

    kind: ClassVar[str] = "ensemble"

    def __init__(self, members: Sequence[NetworkClassifier]) -> None:
        if not members:
            raise UserError("expected one member of an ensemble or more, found none: add some")
        self.members = tuple(members)
        self.name = members[0].name

    novelty_: Novelty
    temperature_: float
    margins_: SafeMargins
    """How far above medians jobs were; and below, above what the forecasts start from."""
    usual_margins_: SafeMargins

    @classmethod
    def of(cls, settings: NetworkSettings, size: int, fitter: Fitter | None = None) -> Self:
        """So many members of the same make, with seeds that follow each other."""
        check_count("the ensemble's size", size)
        makes = (replace(settings, seed=settings.seed + index) for index in range(size))
        return cls([NetworkClassifier(make, fitter) for make in makes])

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Fit each member to all examples but a part of its own, and calibrate on what they were not fitted to.

        With five members or more every row is learned from by most of them, and every row calibrates one that had seen
        no other network of its library and design. Nothing but the usual gap, one number, is fitted in what members
        start from: all rows calibrate that.
        """
        examples = [*train, *validation]
        encoded: dict[tuple[str, bool, int], Encoded] = {}
        held: list[Forecast] = []
        calibrated_on: list[Example] = []
        rounds = rounds_of([example.design for example in examples], len(self.members), self._seed)
        for member, parts in zip(self.members, rounds, strict=True):
            key = member.settings.encoding
            if key not in encoded:
                encoded[key] = Encoded.of(member.settings, examples)
            data = encoded[key]
            member.fit_prepared(data.parted(parts.train, parts.validation))
            kept = [examples[place] for place in parts.calibration.tolist()]
            held.append(member.forecast_inputs(data.rows.inputs.select(parts.calibration), kept))
            calibrated_on += kept
        self.novelty_ = self._novelty(examples, rounds[0])
        self.usual_margins_ = _margins(examples, self._usual_bytes(examples))
        return self._calibrate(Forecast.stacked(held), calibrated_on)

    @property
    def _seed(self) -> int:
        return self.members[0].settings.seed

    def _novelty(self, examples: Sequence[Example], parts: "Round") -> Novelty:
        """From what distance on a job is unlike the examples: the first member's training rows, and its part."""
        matrix = self.members[0].encoder_.matrix(examples)
        apart = torch.cat([parts.validation, parts.calibration])
        return Novelty.fit(matrix[parts.train.numpy()], matrix[apart.numpy()], self._seed)

    def _calibrate(self, plain: Forecast, examples: Sequence[Example]) -> Self:
        """Set width and safe margins by forecasts of examples that are new to who made them."""
        self.temperature_ = best_temperature(plain, examples)
        self.margins_ = _margins(examples, plain.own_quantile_bytes(0.5))
        return self

    def _usual_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """[examples]: what members start from, the virtual GPU's figure for one, corrected by the gap that is usual."""
        first = self.members[0]
        reference = feature_set(first.settings.features).reference_bytes
        return math.exp(first.center_) * np.array([max(reference(example), 1) for example in examples])

    def forecast(self, examples: Sequence[Example]) -> Forecast:
        """The average of the members' distributions.

        Of a job unlike the training set nothing was learned: there the answer is around what they all start from, as
        wide as such figures are off.
        """
        return self._forecast(examples, self.unfamiliar(examples))

    def _forecast(self, examples: Sequence[Example], strange: NDArray[np.bool_]) -> Forecast:
        found = self._plain_forecast(examples).tempered(self.temperature_)
        if not strange.any():
            return found
        usual = self._usual_bytes(examples)
        scales = self.usual_margins_.scales([example.stratum for example in examples])
        return found.recentred(strange, usual.tolist(), relative(scales, usual))

    def _plain_forecast(self, examples: Sequence[Example]) -> Forecast:
        """Members that share an encoder share its work, which is most of an answer's time."""
        encoded: dict[tuple[int, bool], Inputs] = {}
        forecasts = []
        for member in self.members:
            key = (id(member.encoder_), member.settings.reads_tokens)
            if key not in encoded:
                encoded[key] = member.encoder_.inputs(examples, member.settings.reads_tokens)
            forecasts.append(member.forecast_inputs(encoded[key], examples))
        return Forecast.mixed(forecasts)

    def unfamiliar(self, examples: Sequence[Example]) -> NDArray[np.bool_]:
        """[examples]: true for what is unlike the training set, where an answer is a guess."""
        return self.novelty_.flags(self.members[0].encoder_.matrix(examples))

    def safe_bytes(self, examples: Sequence[Example], risk: float) -> NDArray[np.float64]:
        """[examples]: what a job exceeds with at most that probability; infinity where that does not fit.

        The margin is how far jobs of its stratum were above their medians in calibration; of an unfamiliar one, above
        the figures that the networks start from.
        """
        safe, _, _ = self._bounds(examples, risk)
        return safe

    def predict_all(self, examples: Sequence[Example], risk: float) -> Prediction:
        """Return point estimates, bounds and distributions from one pass of the networks."""
        safe, forecast, strange = self._bounds(examples, risk)
        return Prediction(
            forecast.median_bytes(), safe, strange, lambda index, buckets: forecast.one(index).proba(buckets)[0]
        )

    def _bounds(
        self, examples: Sequence[Example], risk: float
    ) -> tuple[NDArray[np.float64], Forecast, NDArray[np.bool_]]:
        """Return the safe figures, the forecast, and which examples are unfamiliar."""
        strata, strange = [example.stratum for example in examples], self.unfamiliar(examples)
        found = self._forecast(examples, strange)
        learned, usual = (item.margins(strata, risk) for item in (self.margins_, self.usual_margins_))
        safe = raised(found.own_quantile_bytes(0.5), np.where(strange, usual, learned))
        return found.on_device(safe), found, strange

    @property
    def needs_simulation(self) -> bool:
        """Whether the members' features need a simulated measurement."""
        return self.members[0].needs_simulation

    @property
    def least_risk(self) -> float:
        """The smallest risk that the calibration rows can speak of."""
        return self.margins_.least_risk

    def safe_buckets(self, examples: Sequence[Example], buckets: Buckets, risk: float) -> NDArray[np.int64]:
        """[examples]: the bucket of the safe answer."""
        return buckets.of(self.safe_bytes(examples, risk))

    def state(self) -> State:
        """The members, and what makes one estimator of them."""
        kept = {"scores": self.margins_.scores, "gaps": self.usual_margins_.scores}
        arrays = {f"{name}.{stratum}": value for name, scores in kept.items() for stratum, value in scores.items()}
        shared = State(
            {
                "members": len(self.members),
                "temperature": self.temperature_,
                "threshold": self.novelty_.threshold,
                "strata": {name: list(scores) for name, scores in kept.items()},
            },
            {"reference": self.novelty_.reference, **arrays},
        )
        return joined({"shared": shared} | {_part(index): item.state() for index, item in enumerate(self.members)})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """An ensemble as it was."""
        shared = state.part("shared")
        count = shared.settings["members"]
        found = cls([NetworkClassifier.from_state(state.part(_part(index))) for index in range(count)])
        encoders = [member.encoder_ for member in found.members]
        for member in found.members:
            member.encoder_ = next(item for item in encoders if item == member.encoder_)
        found.temperature_ = shared.settings["temperature"]
        found.novelty_ = Novelty(shared.arrays["reference"], shared.settings["threshold"])
        margins = {
            name: SafeMargins({stratum: shared.arrays[f"{name}.{stratum}"] for stratum in strata})
            for name, strata in shared.settings["strata"].items()
        }
        found.margins_, found.usual_margins_ = margins["scores"], margins["gaps"]
        return found


def best_temperature(plain: Forecast, examples: Sequence[Example]) -> float:
    """The width under which all but the oddest of the examples are likeliest."""
    bounds, odd = intervals(examples), int(_ODD * len(examples))

    def likelihood(temperature: float) -> float:
        return float(np.sort(plain.tempered(temperature).log_likelihood(*bounds))[odd:].mean())

    return max(_TEMPERATURES, key=likelihood)


def _part(index: int) -> str:
    return f"member{index}"


def _margins(examples: Sequence[Example], estimated_bytes: NDArray[np.float64]) -> SafeMargins:
    """Margins by stratum; a score counts in all strata of which its example tells something."""
    scores = score(_own_bytes(examples), estimated_bytes)
    strata = [(name, value) for example, value in zip(examples, scores, strict=True) for name in example.calibrates]
    return SafeMargins.fit([name for name, _ in strata], [value for _, value in strata])


def _own_bytes(examples: Sequence[Example]) -> NDArray[np.float64]:
    """[examples]: what a job's allocator had; where it did not fit, what it must be said to need: the card's limit."""
    labels = [(example, example.measured) for example in examples]
    used = [label.used_bytes if label.fits else example.capacity_bytes for example, label in labels]
    overhead = [example.overhead_bytes for example in examples]
    return np.maximum(np.array(used, dtype=np.float64) - overhead, 0)
