"""Several classifiers as one, calibrated on jobs that none of them has seen; the estimator that is shipped."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from dataset_builder.errors import UserError, check_count
from models.batch import Inputs
from models.classifiers import Fitter, NetworkClassifier, NetworkSettings, Prepared, prepare
from models.conformal import SafeMargins
from models.example import Example
from models.features import feature_set
from models.forecast import Forecast
from models.forecaster import Forecaster
from models.labels import Buckets
from models.ood import Novelty
from models.storage import State, joined
from models.targets import intervals

_TEMPERATURES = tuple(float(value) for value in np.geomspace(0.5, 3.0, 37))
_CAUTION = 4
"""By how much a risk is divided for a job unlike the training set."""
_ODD = 0.02
"""The share of calibration examples, the least likely ones, without a say in the width: one odd row would set it."""


class Ensemble(Forecaster):
    """Members with seeds of their own; what they say is averaged, and what they know is asked of each."""

    kind: ClassVar[str] = "ensemble"

    def __init__(self, members: Sequence[NetworkClassifier]) -> None:
        if not members:
            raise UserError("expected one member of an ensemble or more, found none: add some")
        self.members = tuple(members)
        self.name = members[0].name
        self.temperature_ = 1.0
        self.margins_: SafeMargins | None = None

    novelty_: Novelty

    @classmethod
    def of(cls, settings: NetworkSettings, size: int, fitter: Fitter | None = None) -> Self:
        """So many members of the same make, with seeds that follow each other."""
        check_count("the ensemble's size", size)
        makes = (replace(settings, seed=settings.seed + index) for index in range(size))
        return cls([NetworkClassifier(make, fitter) for make in makes])

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Fit each member, apart from the others."""
        prepared: dict[tuple[str, bool, int], Prepared] = {}
        for member in self.members:
            key = member.settings.encoding
            if key not in prepared:
                prepared[key] = prepare(member.settings, train, validation)
            member.fit_prepared(prepared[key])
        first = self.members[0]
        encoder = first.encoder_
        self.novelty_ = Novelty.fit(encoder.matrix(train), encoder.matrix(validation), first.settings.seed)
        self.temperature_, self.margins_ = 1.0, None
        return self

    def calibrate(self, examples: Sequence[Example]) -> Self:
        """Set width and safe margins on examples that no member was trained on."""
        plain = self._plain_forecast(examples)
        self.temperature_ = _best_temperature(plain, examples)
        scores = plain.tempered(self.temperature_).scores(_needed_bytes(examples))
        self.margins_ = SafeMargins.fit([example.stratum for example in examples], scores)
        return self

    def forecast(self, examples: Sequence[Example]) -> Forecast:
        """The average of the members' distributions.

        Of a job unlike the training set nothing was learned: there the answer is around what they all start from,
        which is what the virtual GPU says, corrected by the gap that is usual.
        """
        return self._forecast(examples, self.unfamiliar(examples))

    def _forecast(self, examples: Sequence[Example], strange: NDArray[np.bool_]) -> Forecast:
        found = self._plain_forecast(examples).tempered(self.temperature_)
        if not strange.any():
            return found
        first = self.members[0]
        usual, reference = math.exp(first.center_), feature_set(first.settings.features).reference_bytes
        return found.recentred(strange, [usual * reference(example) for example in examples])

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

        An unfamiliar one, for which no such promise can be made, is given the margin of a quarter of the risk.
        """
        return self.judged(examples, risk)[1]

    def judged(
        self, examples: Sequence[Example], risk: float
    ) -> tuple[Forecast, NDArray[np.float64], NDArray[np.bool_]]:
        """The forecast, the safe answers, and which examples are unfamiliar: all of it for the work of one."""
        if self.margins_ is None:
            raise UserError("expected a calibrated estimator for a safe answer, found none: call calibrate() first")
        strata, strange = [example.stratum for example in examples], self.unfamiliar(examples)
        margins = self.margins_.margins(strata, risk)
        wider = self.margins_.margins(strata, max(risk / _CAUTION, self.margins_.least_risk))
        margins = np.where(strange, np.maximum(margins, wider), margins)
        found = self._forecast(examples, strange)
        return found, found.bytes_at_score(margins), strange

    @property
    def least_risk(self) -> float:
        """The smallest risk that the calibration rows can speak of."""
        return 0.0 if self.margins_ is None else self.margins_.least_risk

    def safe_buckets(self, examples: Sequence[Example], buckets: Buckets, risk: float) -> NDArray[np.int64]:
        """[examples]: the bucket of the safe answer."""
        return buckets.of(self.safe_bytes(examples, risk))

    def state(self) -> State:
        """The members, and what makes one estimator of them."""
        scores = self.margins_.scores if self.margins_ else {}
        shared = State(
            {
                "members": len(self.members),
                "temperature": self.temperature_,
                "threshold": self.novelty_.threshold,
                "families": list(scores),
            },
            {"reference": self.novelty_.reference, **{f"scores.{name}": value for name, value in scores.items()}},
        )
        return joined({"shared": shared} | {_part(index): item.state() for index, item in enumerate(self.members)})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """An ensemble as it was."""
        shared = state.part("shared")
        count, families = shared.settings["members"], shared.settings["families"]
        found = cls([NetworkClassifier.from_state(state.part(_part(index))) for index in range(count)])
        encoders = [member.encoder_ for member in found.members]
        for member in found.members:
            member.encoder_ = next(item for item in encoders if item == member.encoder_)
        found.temperature_ = shared.settings["temperature"]
        found.novelty_ = Novelty(shared.arrays["reference"], shared.settings["threshold"])
        if families:
            found.margins_ = SafeMargins({name: shared.arrays[f"scores.{name}"] for name in families})
        return found


def _best_temperature(plain: Forecast, examples: Sequence[Example]) -> float:
    """The width under which all but the oddest of the examples are likeliest."""
    bounds, odd = intervals(examples), int(_ODD * len(examples))

    def likelihood(temperature: float) -> float:
        return float(np.sort(plain.tempered(temperature).log_likelihood(*bounds))[odd:].mean())

    return max(_TEMPERATURES, key=likelihood)


def _part(index: int) -> str:
    return f"member{index}"


def _needed_bytes(examples: Sequence[Example]) -> list[int]:
    """What an answer must reach to be safe: the memory used, or for what did not fit the card's limit."""
    targets = [(example, example.measured) for example in examples]
    return [target.used_bytes if target.fits else example.capacity_bytes for example, target in targets]
