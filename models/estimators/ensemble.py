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
from vramcast.models.calibration import EVERYTHING, CalibratedErrors, with_tail
from vramcast.models.distribution import Distribution, ErrorDistribution, SplicedDistribution, bounds_of
from vramcast.models.estimators._base import SavedEstimator
from vramcast.models.estimators.batch import Inputs
from vramcast.models.estimators.classifiers import Encoded, Fitter, NetworkClassifier, NetworkSettings
from vramcast.models.estimators.labels import intervals
from vramcast.models.estimators.mixture_distribution import MixtureDistribution
from vramcast.models.estimators.network_uncertainty import (
    calibrated_errors,
    in_units,
    relative_scales,
    stratum,
    unit_bytes,
    with_everything,
)
from vramcast.models.example import Example
from vramcast.models.features import feature_set
from vramcast.models.out_of_distribution import OutOfDistribution, flags_of
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
        rounds.append(Round(**{use: _indices(uses, use) for use in ("train", "validation", "calibration")}))
    return rounds


def _indices(uses: Sequence[str], wanted: str) -> Tensor:
    return torch.tensor([index for index, use in enumerate(uses) if use == wanted])


class Ensemble(SavedEstimator):
    """Classifiers with different seeds and training rows, whose distributions are averaged."""

    kind: ClassVar[str] = "ensemble"

    def __init__(self, members: Sequence[NetworkClassifier]) -> None:
        if not members:
            raise UserError("expected one member of an ensemble or more, found none: add some")
        self.members = tuple(members)
        self.name = members[0].name

    out_of_distribution_: OutOfDistribution
    temperature_: float
    errors_: CalibratedErrors
    """Errors of the median; below, those of the reference that the members start from."""
    reference_errors_: CalibratedErrors

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
        distributions: list[MixtureDistribution] = []
        calibrated_on: list[Example] = []
        rounds = rounds_of([example.design for example in examples], len(self.members), self._seed)
        for member, parts in zip(self.members, rounds, strict=True):
            key = member.settings.encoding
            if key not in encoded:
                encoded[key] = Encoded.of(member.settings, examples)
            data = encoded[key]
            member.fit_prepared(data.parted(parts.train, parts.validation))
            own = [examples[index] for index in parts.calibration.tolist()]
            distributions.append(member.distribution_of(data.rows.inputs.select(parts.calibration), own))
            calibrated_on += own
        self.out_of_distribution_ = self._out_of_distribution(examples, rounds[0])
        self.reference_errors_ = calibrated_errors(examples, self._usual_bytes(examples))
        return self._calibrate(MixtureDistribution.stacked(distributions), calibrated_on)

    @property
    def _seed(self) -> int:
        return self.members[0].settings.seed

    def _out_of_distribution(self, examples: Sequence[Example], parts: "Round") -> OutOfDistribution:
        """Learn the distance from which a job is out of distribution, with the rows of the first member."""
        matrix = self.members[0].encoder_.matrix(examples)
        apart = torch.cat([parts.validation, parts.calibration])
        return OutOfDistribution.fit(matrix[parts.train.numpy()], matrix[apart.numpy()], self._seed)

    def _calibrate(self, plain: MixtureDistribution, examples: Sequence[Example]) -> Self:
        """Set width and errors by distributions of examples that the members were not fitted to."""
        self.temperature_ = best_temperature(plain, examples)
        self.errors_ = calibrated_errors(examples, plain.own_quantile_bytes(0.5))
        return self

    def _usual_bytes(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """Return [examples]: the reference of the members, corrected by the usual gap."""
        first = self.members[0]
        reference = feature_set(first.settings.features).reference_bytes
        return math.exp(first.center_) * np.array([max(reference(example), 1) for example in examples])

    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> Distribution:
        """Return the average of the members; with a risk, its upper half are the errors of the job's stratum.

        A job out of distribution is centred on its reference instead, with the errors of references.
        """
        matrix = self.members[0].encoder_.matrix(examples)
        flags = flags_of(self.out_of_distribution_.ratios(matrix), examples)
        mixture = replace(self._average(examples, matrix).tempered(self.temperature_), out_of_distribution=flags)
        if flags.any():
            usual = self._usual_bytes(examples)
            mixture = mixture.recentred(usual, relative_scales(self.reference_errors_, examples, usual))
        return mixture if risk is None else self._spliced(mixture, examples, risk)

    def _average(self, examples: Sequence[Example], first: NDArray[np.float64]) -> MixtureDistribution:
        """Average the members; those with one encoder share the encoding, which takes most of the time.

        `first` is the matrix of the first member's encoder.
        """
        encoded: dict[tuple[int, bool], Inputs] = {}
        distributions = []
        for member in self.members:
            key = (id(member.encoder_), member.settings.reads_tokens)
            if key not in encoded:
                matrix = first if member.encoder_ is self.members[0].encoder_ else None
                encoded[key] = member.encoder_.inputs(examples, member.settings.reads_tokens, matrix)
            distributions.append(member.distribution_of(encoded[key], examples))
        return MixtureDistribution.mixed(distributions)

    def _spliced(self, mixture: MixtureDistribution, examples: Sequence[Example], risk: float) -> SplicedDistribution:
        self.errors_.check_risk(risk)
        bounds = bounds_of(examples, mixture.out_of_distribution)
        medians, errors = mixture.own_quantile_bytes(0.5), (self.errors_, self.reference_errors_)
        chosen = [
            (flag, errors[flag].stratum_of([stratum(example), EVERYTHING], risk))
            for example, flag in zip(examples, bounds["out_of_distribution"].tolist(), strict=True)
        ]
        scores = {(flag, name): in_units(with_tail(errors[flag].scores[name])) for flag, name in set(chosen)}
        upper = ErrorDistribution(
            **bounds,
            estimate_bytes=bounds["overhead_bytes"] + medians,
            unit_bytes=unit_bytes(medians),
            scores=[scores[key] for key in chosen],
        )
        return SplicedDistribution(**bounds, lower=mixture, upper=upper)

    @property
    def needs_simulation(self) -> bool:
        """True if the members' features need a simulated measurement."""
        return self.members[0].needs_simulation

    @property
    def least_risk(self) -> float:
        """The smallest risk that the number of calibration rows supports."""
        return self.errors_.least_risk

    def state(self) -> State:
        """Return the states of the members, and what they share."""
        errors_by_use = {"scores": self.errors_, "gaps": self.reference_errors_}
        strata = {use: [name for name in errors.scores if name != EVERYTHING] for use, errors in errors_by_use.items()}
        arrays = {f"{use}.{name}": errors_by_use[use].scores[name] for use, names in strata.items() for name in names}
        shared = State(
            {
                "members": len(self.members),
                "temperature": self.temperature_,
                "threshold": self.out_of_distribution_.threshold,
                "strata": strata,
            },
            {"reference": self.out_of_distribution_.reference, **arrays},
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
        reference, threshold = shared.arrays["reference"], shared.settings["threshold"]
        ensemble.out_of_distribution_ = OutOfDistribution(reference, threshold)
        ensemble.errors_, ensemble.reference_errors_ = (
            with_everything({name: shared.arrays[f"{use}.{name}"] for name in shared.settings["strata"][use]})
            for use in ("scores", "gaps")
        )
        return ensemble


def best_temperature(plain: MixtureDistribution, examples: Sequence[Example]) -> float:
    """Return the temperature with the largest likelihood of all but the least likely examples."""
    bounds, odd = intervals(examples), int(_ODD * len(examples))

    def likelihood(temperature: float) -> float:
        return float(np.sort(plain.tempered(temperature).log_likelihood(*bounds))[odd:].mean())

    return max(_TEMPERATURES, key=likelihood)


def _part(index: int) -> str:
    return f"member{index}"
