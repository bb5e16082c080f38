"""From jobs to answers: `load("universal").classify(module, inputs)`, and the same for specs and layer tables."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vramcast.dataset_builder.defaults import BUCKET_MIB, RISK
from vramcast.dataset_builder.devices import DEFAULT_DEVICE, load_profile
from vramcast.dataset_builder.families.meta_device import copy_to_meta
from vramcast.dataset_builder.jobs.batches import resized
from vramcast.dataset_builder.jobs.job import Job, ModuleJob, SpecJob
from vramcast.dataset_builder.jobs.steps import Step
from vramcast.dataset_builder.schema import LayerTable, Spec
from vramcast.dataset_builder.simulation.inspector import Inspector
from vramcast.errors import UserError, check_probability
from vramcast.models.answer import Answer, Bucket
from vramcast.models.checkpoint import checkpoint_directory, load_checkpoint
from vramcast.models.ensemble import Ensemble
from vramcast.models.example import Example
from vramcast.models.examples import ENDLESS_BYTES
from vramcast.models.features import feature_set
from vramcast.models.labels import Buckets, told
from vramcast.models.questions import Question, question_of, question_of_table
from vramcast.virtual_gpu.sizes import MIB
from vramcast.virtual_gpu.training_setup import TrainingSetup

TABLES_ALONE = "universal_layers"
"""The released estimator for layer tables alone: it reads no simulation."""


class Classifier:
    """Answers how much of a device a training job will use, and whether it fits."""

    def __init__(self, name: str, tables: str = TABLES_ALONE) -> None:
        self.name = Path(name).name
        self.estimator = _ensemble(name)
        self._tables = tables

    def classify(
        self,
        module: nn.Module,
        inputs: Any,
        *,
        optimizer: str = "adamw",
        device: str = DEFAULT_DEVICE,
        batch_size: int | None = None,
        dtype: str | None = None,
        autocast: str | None = None,
        checkpointing: bool = False,
        accumulate: int = 1,
        step: Step | None = None,
        risk: float = RISK,
    ) -> Answer:
        """A module of this process, which is neither changed nor run with its numbers.

        `inputs` is one batch (a tensor, a tuple of arguments, or a mapping of keyword arguments), or a function from a
        batch size to one. A batch may be of any size and on any device: `batch_size` says how large it is in training.
        `step(module, batch)` returns the loss, where the usual one for the module's output will not do.
        """
        start = time.perf_counter()
        if not isinstance(module, nn.Module):
            raise UserError(f"expected a torch.nn.Module, found {type(module).__name__}: hand in the network itself")
        make, given = (inputs, None) if callable(inputs) and not isinstance(inputs, nn.Module) else resized(inputs)
        size = given if batch_size is None else batch_size
        if size is None:
            raise UserError("expected a batch size beside a function that makes inputs, found none: give batch_size=N")
        job = ModuleJob(copy_to_meta(module), make, step)
        wishes = {
            "batch_size": size,
            "optimizer": optimizer,
            "dtype": dtype,
            "autocast": autocast,
            "checkpointing": checkpointing,
            "accumulate": accumulate,
        }
        training = job.setup(wishes)
        return self._inspected(type(module).__name__, job, training, device, risk, start)

    def classify_spec(
        self, spec: Spec, *, device: str = DEFAULT_DEVICE, risk: float = RISK, target: str | None = None
    ) -> Answer:
        """The network and training that a spec of the builder describes; nothing of a user's is run."""
        start = time.perf_counter()
        return self._inspected(target or spec.id, SpecJob(spec), spec.training, device, risk, start)

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
        """A network of which nothing but a layer table is known: nothing is simulated."""
        question = question_of_table(target, table, training, load_profile(device), family)
        return self.answers([question], risk)[0]

    def _inspected(
        self, target: str, job: Job, training: TrainingSetup, device: str, risk: float, start: float
    ) -> Answer:
        profile = load_profile(device)
        findings = Inspector(job).examine(training, [profile])
        answer = self.answers([question_of(target, findings, profile)], risk)[0]
        return replace(answer, seconds=time.perf_counter() - start)

    def answers(self, questions: Sequence[Question], risk: float = RISK, bucket_mib: int | None = None) -> list[Answer]:
        """An answer to each question, in order; those of one estimator are asked in one go.

        `seconds` is the time of a single question's estimate; what was simulated before is the caller's to add.
        """
        check_probability("risk", risk)
        found: dict[int, Answer] = {}
        for name, estimator, members in self._by_estimator(questions):
            start = time.perf_counter()
            asked = [questions[index] for index in members]
            made = _answers(name, estimator, asked, risk, bucket_mib or BUCKET_MIB)
            seconds = (time.perf_counter() - start) / len(asked)
            found.update(zip(members, (replace(item, seconds=seconds) for item in made), strict=True))
        return [found[index] for index in range(len(questions))]

    def distribution(self, question: Question, bucket_mib: int = BUCKET_MIB) -> tuple[Buckets, NDArray[np.float64]]:
        """The buckets of a device, and the probability of each for a question: [classes]."""
        buckets = Buckets(bucket_mib * MIB, question.example.capacity_bytes)
        _, estimator = self._estimator_for(question.example)
        return buckets, estimator.predict_proba([question.example], buckets)[0]

    def _by_estimator(self, questions: Sequence[Question]) -> list[tuple[str, Ensemble, list[int]]]:
        groups: dict[str, tuple[Ensemble, list[int]]] = {}
        for index, question in enumerate(questions):
            name, estimator = self._estimator_for(question.example)
            groups.setdefault(name, (estimator, []))[1].append(index)
        return [(name, estimator, members) for name, (estimator, members) in groups.items()]

    def _estimator_for(self, example: Example) -> tuple[str, Ensemble]:
        """The checkpoint itself, or another for what was not simulated where it cannot do without."""
        if example.simulated is not None or not _needs_simulation(self.estimator):
            return self.name, self.estimator
        return Path(self._tables).name, self._for_tables

    @cached_property
    def _for_tables(self) -> Ensemble:
        return _ensemble(self._tables)


def _ensemble(name: str) -> Ensemble:
    found = load_checkpoint(checkpoint_directory(name))
    if not isinstance(found, Ensemble):
        raise UserError(f"expected an ensemble in the checkpoint {name}, found {found.name}: name another")
    return found


def _needs_simulation(estimator: Ensemble) -> bool:
    return feature_set(estimator.members[0].settings.features).needs_simulation


def _answers(
    name: str, estimator: Ensemble, questions: Sequence[Question], risk: float, bucket_mib: int
) -> list[Answer]:
    examples = [question.example for question in questions]
    endless = [question.endless or replace(question.example, capacity_bytes=ENDLESS_BYTES) for question in questions]
    risk = max(risk, estimator.least_risk)
    forecast, safe, strange = estimator.judged([*examples, *endless], risk)
    medians, safe = (
        _filled(figures[: len(examples)], figures[len(examples) :], examples)
        for figures in (forecast.median_bytes(), safe)
    )
    found = []
    for index, question in enumerate(questions):
        buckets = Buckets(bucket_mib * MIB, question.example.capacity_bytes)
        proba = forecast.one(index).proba(buckets)[0]
        found.append(
            _answer(
                question,
                _bucket(buckets, proba),
                estimate_bytes=medians[index],
                safe_bytes=max(safe[index], medians[index]),
                oom_probability=float(proba[-1]),
                risk=risk,
                strange=bool(strange[index]),
                checkpoint=name,
            )
        )
    return found


def _filled(
    figures: NDArray[np.float64], endless: NDArray[np.float64], examples: Sequence[Example]
) -> NDArray[np.float64]:
    """What does not fit has the figure of a card without end, which is more than its own card has in any case.

    At small risks a bound may be beyond even that: it stays a number, which JSON and schedulers can take.
    """
    above = np.array([example.capacity_bytes + MIB for example in examples], dtype=np.float64)
    return np.where(np.isfinite(figures), figures, np.clip(endless, above, ENDLESS_BYTES))


def _bucket(buckets: Buckets, proba: NDArray[np.float64]) -> Bucket:
    index = int(told(proba[None])[0])
    edges = buckets.edges_bytes / MIB
    last = index == buckets.fitting
    return Bucket(
        index=index,
        lower_mib=float(edges[index]),
        upper_mib=None if last else float(edges[index + 1]),
        probability=float(proba[index]),
    )


def _answer(
    question: Question,
    bucket: Bucket,
    *,
    estimate_bytes: float,
    safe_bytes: float,
    oom_probability: float,
    risk: float,
    strange: bool,
    checkpoint: str,
) -> Answer:
    example, profile, peak = question.example, question.profile, question.peak
    calibrated = f"calibrated on {profile.calibrated_on}" if profile.calibrated_on else "not calibrated"
    return Answer(
        target=question.target,
        batch_size=example.training.batch_size,
        device=profile.name,
        bucket=bucket,
        estimate_mib=float(estimate_bytes) / MIB,
        safe_mib=float(safe_bytes) / MIB,
        allocated_mib=_mib(peak.allocated_bytes) if peak else None,
        reserved_mib=_mib(peak.reserved_bytes) if peak else None,
        capacity_mib=example.capacity_bytes / MIB,
        oom_probability=oom_probability,
        risk=risk,
        out_of_distribution=strange,
        checkpoint=checkpoint,
        profile=f"{profile.title}, {calibrated}",
        seconds=0.0,
        breakdown_mib={use: size / MIB for use, size in peak.breakdown.items()} if peak else {},
        notes=tuple(dict.fromkeys(question.notes)),
    )


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB
