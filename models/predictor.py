"""The predictor: turns simulations and layer tables into answers, with any estimator."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vramcast.defaults import BUCKET_MIB, RISK
from vramcast.device.profiles import DEFAULT_DEVICE, load_profile
from vramcast.errors import UserError, check_probability, suggestion
from vramcast.jobs.analysis.optimizers import OPTIMIZERS
from vramcast.jobs.batches import resized
from vramcast.jobs.families.meta_device import copy_to_meta
from vramcast.jobs.job import Job, ModuleJob, SpecJob
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.optimizers import DEFAULT, describe_optimizer, parse_optimizer
from vramcast.jobs.spec import LayerTable, Spec
from vramcast.jobs.steps import TrainingStep
from vramcast.models.answer import Answer, Bucket
from vramcast.models.buckets import Buckets, choose_bucket
from vramcast.models.checkpoint import load_checkpoint
from vramcast.models.distribution import Distribution
from vramcast.models.estimators._base import Estimator
from vramcast.models.example import UNBOUNDED_BYTES, Example
from vramcast.models.examples import NetworkFacts, example_of_simulation, example_of_table
from vramcast.models.released import checkpoint_directory
from vramcast.models.uncertainty import may_show_trials
from vramcast.simulation.result import RankPeaks, Simulation
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import Measurement
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.training.setup import (
    OPTIONS,
    TrainingSetup,
    check_trained_whole,
    parse_call,
    with_shorthands,
)

TABLES_ALONE = "universal_layers"
"""The released estimator for layer tables alone, which needs no simulation."""
_TABLE_NOTE = "classified from a layer table alone: nothing was simulated, and the safe figure is wider"


@dataclass(frozen=True)
class Question:
    """One job on one device, for which an answer is wanted."""

    target: str
    example: Example
    profile: DeviceProfile
    unbounded: Example | None = None
    """The job on the same device without a memory limit: the need of a job that does not fit."""
    peak: Measurement | None = None
    """The unbounded simulation, whose breakdown the answer shows."""
    simulation: Simulation | None = None
    notes: tuple[str, ...] = ()
    wider: Example | None = None
    """The job with the largest activations that are likely, where they are inferred: the safe figure is its own."""

    @classmethod
    def of_simulation(cls, target: str, simulation: Simulation, profile: DeviceProfile) -> Self:
        """Return the question about a simulated job on one of its devices."""
        return cls.of_devices(target, simulation, [profile])[0]

    @classmethod
    def of_devices(cls, target: str, simulation: Simulation, profiles: Iterable[DeviceProfile]) -> list[Self]:
        """Return the questions about a simulated job on some of its devices."""
        facts = NetworkFacts.of(simulation.table, simulation.training)
        return [cls._on_device(target, simulation, profile, facts) for profile in profiles]

    @classmethod
    def _on_device(cls, target: str, simulation: Simulation, profile: DeviceProfile, facts: NetworkFacts) -> Self:
        peaks = simulation.peaks[profile.name]
        example = example_of_simulation(simulation, profile, facts=facts)
        return cls(
            target,
            example,
            profile,
            example_of_simulation(simulation, profile, unbounded=True, facts=facts) if peaks.unbounded else None,
            peaks.unbounded,
            simulation,
            (*simulation.notes, *peaks.bounded.notes, *_trial_notes(example)),
        )

    @classmethod
    def of_table(
        cls,
        target: str,
        table: LayerTable,
        training: TrainingSetup,
        profile: DeviceProfile,
        family: str | None = None,
        simulated: Measurement | None = None,
    ) -> Self:
        """Return the question about a layer table, with a measurement if it was simulated elsewhere."""
        notes = () if simulated else (_TABLE_NOTE,)
        example = replace(example_of_table(table, training, profile, family=family), simulated=simulated)
        return cls(target, example, profile, notes=(*notes, *profile.notes))

    @classmethod
    def of_description(
        cls, target: str, description: NetworkDescription, training: TrainingSetup, profiles: Iterable[DeviceProfile]
    ) -> list[Self]:
        """Return the questions about a network without code on some devices."""
        check_trained_whole(replace(training, adapter=None))  # the layers of an adapter are in the table
        if (optimizer := parse_call(training.optimizer)[0]) not in OPTIMIZERS:
            raise UserError(
                f"expected an optimizer of {sorted(OPTIMIZERS)} beside layers alone, found {optimizer}: name one"
            )
        widest, family = description.widest, description.family
        return [
            replace(
                question,
                notes=(*description.notes, *question.notes),
                wider=example_of_table(widest, training, profile, family=family) if widest else None,
            )
            for profile in profiles
            for question in [cls.of_table(target, description.table, training, profile, family)]
        ]


def table_training(options: Mapping[str, Any]) -> TrainingSetup:
    """Return the training of a network whose layers alone are known; raise for options that change the layers.

    None leaves an option to its default.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    training = TrainingSetup(**{**chosen, "optimizer": parse_optimizer(chosen.get("optimizer", DEFAULT))})
    check_trained_whole(training)
    return training


def _trial_notes(example: Example) -> tuple[str, ...]:
    if not may_show_trials(example):
        return ()
    most_mib = (example.simulation.trial_bytes or 0) // MIB
    return (f"cudnn.benchmark tries workspaces: for moments of the first step the job reserves up to {most_mib:,} MiB",)


class Predictor:
    """Answers how much of a device a training job will use, and whether it fits.

    >>> predictor = Predictor.load("universal")
    >>> network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    >>> answer = predictor.classify(network, torch.empty(32, 64), optimizer="adamw", device="rtx_4090")
    >>> answer.verdict
    'fits'
    >>> answer.estimate_mib <= answer.safe_mib < answer.capacity_mib
    True
    >>> answer.out_of_distribution
    False

    Known limits: figures are simulated, with errors from measurements of others; none was measured on the user's GPU.
    The safe figure holds for jobs like the calibration jobs: on other devices, for ranks of a distributed run and for
    jobs out of distribution its probability is an assumption. Memory of other processes on the device does not count,
    except on a profile that names it.
    """

    def __init__(self, estimator: Estimator, name: str | None = None, tables: str = TABLES_ALONE) -> None:
        self.estimator = estimator
        self.name = name or estimator.name
        self._tables = tables

    @classmethod
    def load(cls, name: str, tables: str = TABLES_ALONE) -> Self:
        """Read a checkpoint by its released name or its directory."""
        with _default_modes():
            return cls(load_checkpoint(checkpoint_directory(name)), Path(name).name, tables)

    def classify(
        self,
        module: nn.Module,
        inputs: Any,
        *,
        optimizer: Any = DEFAULT,
        device: str = DEFAULT_DEVICE,
        batch_size: int | None = None,
        step: TrainingStep | None = None,
        risk: float = RISK,
        **options: Any,
    ) -> Answer:
        """Return the answer for a module of this process, which is neither changed nor run on data.

        Args:
            module: The network to train.
            inputs: One batch (a tensor, a tuple of arguments, or a mapping of keyword arguments), or a function from
                a batch size to one. The batch may have any size and lie on any device.
            optimizer: A name such as "adamw" or "SGD(momentum=0.9)", or an optimizer of torch.optim: an object of the
                module's parameters, a class, or a partial of one.
            device: The name of a device profile, see `vramcast.devices()`.
            batch_size: The batch size in training, if it is not that of `inputs`.
            step: A function of module and batch that returns the loss, if the usual loss does not suit the output.
            risk: The probability that the safe figure is too low.
            options: Other fields of `TrainingSetup`, such as dtype, autocast, checkpointing or accumulate; for several
                GPUs parallel="fsdp2" with world_size and its other options.
        """
        start = time.perf_counter()
        if not isinstance(module, nn.Module):
            raise UserError(f"expected a torch.nn.Module, found {type(module).__name__}: pass the network itself")
        is_function = callable(inputs) and not isinstance(inputs, nn.Module)
        make, sample_size = (inputs, None) if is_function else resized(inputs)
        size = sample_size if batch_size is None else batch_size
        if size is None:
            raise UserError("expected a batch size beside a function that makes inputs, found none: give batch_size=N")
        text, factory = describe_optimizer(optimizer, module)
        setup = {"batch_size": size, "optimizer": text, **_training_options(with_shorthands(options))}
        with _default_modes():
            job = ModuleJob(copy_to_meta(module), make, step, factory)
            return self._simulated(type(module).__name__, job, setup, device, risk, start)

    def classify_spec(
        self, spec: Spec, *, device: str = DEFAULT_DEVICE, risk: float = RISK, target: str | None = None
    ) -> Answer:
        """Return the answer for a spec."""
        return self._simulated(target or spec.id, SpecJob(spec), {}, device, risk, time.perf_counter())

    def classify_table(
        self,
        table: LayerTable,
        training: TrainingSetup,
        *,
        device: str = DEFAULT_DEVICE,
        risk: float = RISK,
        target: str = "layer table",
        family: str | None = None,
    ) -> Answer:
        """Return the answer for a layer table, without a simulation."""
        return self.answers([Question.of_table(target, table, training, load_profile(device), family)], risk)[0]

    def _simulated(
        self, target: str, job: Job, options: dict[str, Any], device: str, risk: float, start: float
    ) -> Answer:
        profile = load_profile(device)
        simulation = Simulator(job).simulate(options, [profile])
        answer = self.answers([Question.of_simulation(target, simulation, profile)], risk)[0]
        return replace(answer, seconds=time.perf_counter() - start)

    def answers(self, questions: Sequence[Question], risk: float = RISK, bucket_mib: int | None = None) -> list[Answer]:
        """Return an answer to each question, in order; questions for one estimator share a pass.

        `seconds` is the time of the estimate for one question; callers add the time of the simulation.
        """
        check_probability("risk", risk)
        answers: dict[int, Answer] = {}
        for name, estimator, members in self._by_estimator(questions):
            start = time.perf_counter()
            chosen = [questions[index] for index in members]
            predicted = _answers(name, estimator, chosen, risk, bucket_mib or BUCKET_MIB, start)
            answers.update(zip(members, predicted, strict=True))
        self._widen(answers, questions, risk, bucket_mib)
        return [answers[index] for index in range(len(questions))]

    def _widen(
        self, answers: dict[int, Answer], questions: Sequence[Question], risk: float, bucket_mib: int | None
    ) -> None:
        """Raise the safe figures of jobs whose activations are inferred to those of the widest ones."""
        inferred = [index for index, question in enumerate(questions) if question.wider]
        wider = [replace(item, example=item.wider, wider=None) for item in questions if item.wider]
        for index, most in zip(inferred, self.answers(wider, risk, bucket_mib) if wider else (), strict=True):
            answers[index] = replace(
                answers[index],
                safe_mib=max(answers[index].safe_mib, most.safe_mib),
                oom_probability=max(answers[index].oom_probability, most.oom_probability),
                out_of_distribution=True,
            )

    def bucket_probabilities(
        self, question: Question, bucket_mib: int = BUCKET_MIB, risk: float = RISK
    ) -> tuple[Buckets, NDArray[np.float64]]:
        """Return the buckets of a device, and the probability of each for a question: [classes]."""
        buckets = Buckets(bucket_mib * MIB, question.example.capacity_bytes)
        _, estimator = self._estimator_for(question.example)
        return buckets, estimator.distribution([question.example], risk).proba(buckets)[0]

    def _by_estimator(self, questions: Sequence[Question]) -> list[tuple[str, Estimator, list[int]]]:
        groups: dict[str, tuple[Estimator, list[int]]] = {}
        for index, question in enumerate(questions):
            name, estimator = self._estimator_for(question.example)
            groups.setdefault(name, (estimator, []))[1].append(index)
        return [(name, estimator, members) for name, (estimator, members) in groups.items()]

    def _estimator_for(self, example: Example) -> tuple[str, Estimator]:
        """Return the estimator, or the one for tables if it needs a simulation that the example lacks."""
        if example.simulated is not None or not self.estimator.needs_simulation:
            return self.name, self.estimator
        return Path(self._tables).name, self._for_tables

    @cached_property
    def _for_tables(self) -> Estimator:
        return load_checkpoint(checkpoint_directory(self._tables))


def _training_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of training options; dtypes of torch become names, and True the usual choice."""
    for name in options:
        if name not in OPTIONS:
            hint = suggestion(name, OPTIONS, "remove it")
            raise UserError(f"expected options among {sorted(OPTIONS)}, found {name!r}: {hint}")
    chosen = {name: OPTIONS[name].bare if value is True and OPTIONS[name].bare else value
              for name, value in options.items()}  # fmt: skip
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in chosen.items()
    }


@contextmanager
def _default_modes() -> Iterator[None]:
    """Record gradients and make tensors on the CPU, whatever the caller has set."""
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), device:
        yield


def _answers(
    name: str, estimator: Estimator, questions: Sequence[Question], risk: float, bucket_mib: int, start: float
) -> list[Answer]:
    """Return the answers of one estimator; their `seconds` are shares of the time since `start`."""
    examples = [item.example for item in questions]
    risk = max(risk, estimator.least_risk)
    distribution = estimator.distribution(examples, risk)
    points, safe = _figures(distribution, risk)
    if too_large := np.flatnonzero(np.isinf(points) | np.isinf(safe)).tolist():
        unbounded = [questions[index].unbounded or _without_limit(examples[index]) for index in too_large]
        needs = _figures(estimator.distribution(unbounded, risk), risk)
        for figures, need in zip((points, safe), needs, strict=True):
            figures[too_large] = _finite(figures[too_large], need, [examples[index] for index in too_large])
    seconds = (time.perf_counter() - start) / len(questions)
    answers: dict[int, Answer] = {}
    for capacity, members in _by_capacity(examples).items():
        buckets, whole = Buckets(bucket_mib * MIB, capacity), Buckets(capacity, capacity)  # whole ends at the capacity
        oom = distribution.proba(whole, members)[:, -1].tolist()
        for row, proba in enumerate(distribution.proba(buckets, members)):
            index = members[row]
            own_bytes = safe[index] if distribution.calibrated else _quantile_bytes(buckets, proba, risk)
            answers[index] = _answer(
                questions[index],
                _bucket(buckets, proba),
                oom_probability=oom[row],
                estimate_bytes=float(points[index]),
                safe_bytes=float(max(own_bytes, points[index])),
                risk=risk,
                out_of_distribution=bool(distribution.out_of_distribution[index]),
                checkpoint=name,
                notes=() if distribution.calibrated else (_uncalibrated(name),),
                seconds=seconds,
            )
    return [answers[index] for index in range(len(questions))]


def _uncalibrated(name: str) -> str:
    return f"{name} has no calibrated bound: the safe figure is its own quantile"


def _without_limit(example: Example) -> Example:
    return replace(example, capacity_bytes=UNBOUNDED_BYTES)


def _by_capacity(examples: Sequence[Example]) -> dict[int, list[int]]:
    """Return the indices of the examples on devices of each size, which share their buckets."""
    members: dict[int, list[int]] = {}
    for index, example in enumerate(examples):
        members.setdefault(example.capacity_bytes, []).append(index)
    return members


def _figures(distribution: Distribution, risk: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return [n] and [n]: point estimates, and safe figures, which are zero without a calibrated bound."""
    points = distribution.point_bytes()
    return points, distribution.on_device(1 - risk) if distribution.calibrated else np.zeros_like(points)


def _finite(
    figures: NDArray[np.float64], unbounded: NDArray[np.float64], examples: Sequence[Example]
) -> NDArray[np.float64]:
    """Return [examples]: the figures of examples, infinity replaced by those without a memory limit.

    An unbounded figure is more than the device has, and a number that JSON can hold.
    """
    above = np.array([example.capacity_bytes + MIB for example in examples], dtype=np.float64)
    return np.where(np.isfinite(figures), figures, np.clip(unbounded, above, UNBOUNDED_BYTES))


def _quantile_bytes(buckets: Buckets, proba: NDArray[np.float64], risk: float) -> float:
    """Return the upper edge of the bucket at which the probability reaches 1 - risk."""
    index = int(np.argmax(np.cumsum(proba) >= 1 - risk - 1e-9))
    return float(buckets.edges_bytes[index + 1]) if index < buckets.fitting else buckets.capacity_bytes + MIB


def _bucket(buckets: Buckets, proba: NDArray[np.float64]) -> Bucket:
    index = int(choose_bucket(proba[None])[0])
    edges = buckets.edges_bytes / MIB
    return Bucket(
        index=index,
        lower_mib=float(edges[index]),
        upper_mib=None if index == buckets.fitting else float(edges[index + 1]),
        probability=float(proba[index]),
    )


def _answer(
    question: Question,
    bucket: Bucket,
    *,
    oom_probability: float,
    estimate_bytes: float,
    safe_bytes: float,
    risk: float,
    out_of_distribution: bool,
    checkpoint: str,
    notes: tuple[str, ...],
    seconds: float,
) -> Answer:
    example, profile, peak, simulation = question.example, question.profile, question.peak, question.simulation
    calibrated = f"calibrated on {profile.calibrated_on}" if profile.calibrated_on else "not calibrated"
    return Answer(
        target=question.target,
        batch_size=example.training.batch_size,
        device=profile.name,
        bucket=bucket,
        estimate_mib=estimate_bytes / MIB,
        safe_mib=safe_bytes / MIB,
        allocated_mib=_mib(peak.allocated_bytes) if peak else None,
        reserved_mib=_mib(peak.reserved_bytes) if peak else None,
        capacity_mib=example.capacity_bytes / MIB,
        oom_probability=oom_probability,
        risk=risk,
        out_of_distribution=out_of_distribution,
        checkpoint=checkpoint,
        profile=f"{profile.title}, {calibrated}",
        seconds=seconds,
        breakdown_mib={use: size / MIB for use, size in peak.breakdown.items()} if peak else {},
        notes=tuple(dict.fromkeys((*question.notes, *notes))),
        inputs=simulation.inputs if simulation else (),
        traced_with=simulation.traced_with if simulation else {},
        parallel=example.training.parallel,
        ranks=tuple(_rank(item) for item in simulation.ranks) if simulation else (),
    )


def _rank(peaks: RankPeaks) -> dict[str, Any]:
    return {
        "rank": peaks.rank,
        "count": peaks.count,
        "allocated_mib": peaks.allocated_bytes / MIB,
        "reserved_mib": peaks.reserved_bytes / MIB,
    }


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB
