"""The loaded checkpoint: answers batches of questions, and reports the state of its files."""

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from vramcast.collocation.observed_peak import ObservedPeak, reservation_bytes
from vramcast.errors import UserError
from vramcast.models.answer import TIGHT, Answer
from vramcast.models.checkpoint import load_checkpoint, load_metrics
from vramcast.models.json_figures import rounded
from vramcast.models.predictor import Predictor, Question
from vramcast.models.released import checkpoint_directory
from vramcast.models.storage import ESTIMATOR
from vramcast.virtual_gpu.allocator.sizes import MIB

_LEAST_SHARE = 0.0005
"""Buckets with less are left out of a distribution, which may have two hundred of them."""
_PLACE = re.compile(r" \(at [^)]*\)")
"""The line of a library's code in a note."""
_BEYOND_MIB = 2.0**30
"""A pebibyte, in place of anything larger."""
_MOST_ATTENTION = 1 << 24
"""Pairs of layers in one forward pass: the memory of attention grows with them."""


@dataclass(frozen=True)
class JobQuestion:
    """A question with the options of its request."""

    question: Question
    risk: float
    bucket_mib: int
    distribution: bool = False


@dataclass(frozen=True)
class ObservedJob:
    """A job that ran on a device before, so that its reservation needs no forecast."""

    device: str
    capacity_mib: float
    observed: ObservedPeak
    basis: str = "observed"

    @property
    def reservation_mib(self) -> float:
        """The observed peak with a margin: at most the whole device, and at least the peak."""
        with_margin_mib = reservation_bytes(self.observed.peak_bytes) / MIB
        return max(min(with_margin_mib, self.capacity_mib), self.observed.peak_bytes / MIB)

    @property
    def need_mib(self) -> float:
        """The same as the reservation."""
        return self.reservation_mib


@dataclass(frozen=True)
class EstimatedJob:
    """An answer, with the probability of each bucket on request, and with the observations of the job."""

    answer: Answer
    distribution: list[dict[str, Any]] | None = None
    observed: ObservedPeak | None = None
    """The observations of the job on that device."""

    @property
    def device(self) -> str:
        """The device profile of the answer."""
        return self.answer.device

    @property
    def capacity_mib(self) -> float:
        """The memory of that device for all jobs."""
        return self.answer.capacity_mib

    @property
    def basis(self) -> str:
        """The source of the need."""
        return "observed" if self.observed else "forecast"

    @property
    def need_mib(self) -> float:
        """The observed peak and a margin, or the safe answer without observations."""
        if self.observed is None:
            return self.answer.safe_mib
        return ObservedJob(self.device, self.answer.capacity_mib, self.observed).reservation_mib

    @property
    def reservation_mib(self) -> float:
        """The need for schedulers that turn it into a request: one above the device would wait forever.

        A job that is likely to fit, but not safely, gets the whole device: alone it has the best chance.
        """
        tight = self.observed is None and self.answer.verdict == TIGHT
        return self.answer.capacity_mib if tight else self.need_mib

    def to_json(self) -> dict[str, Any]:
        """Return the forecast and the observations as they are sent to the client."""
        values = {
            **self.answer.to_dict(),
            "distribution": self.distribution,
            "need_mib": self.need_mib,
            "basis": self.basis,
            "observed": observed_json(self.observed) if self.observed else None,
        }
        return dict(rounded(values))


def observed_json(observed: ObservedPeak) -> dict[str, Any]:
    """Return observations as they are sent to the client."""
    return dict(rounded({"runs": observed.runs, "peak_mib": observed.peak_bytes / MIB}))


class CheckpointProtocol(Protocol):
    """The checkpoint as the service uses it."""

    @property
    def status(self) -> dict[str, Any]:
        """The status for /readyz and /v1/checkpoints."""

    def answers(self, questions: Sequence[JobQuestion]) -> list[EstimatedJob]:
        """Return an answer to each question."""


class Checkpoint:
    """A checkpoint that is read once; later changes of its files do not affect its answers."""

    def __init__(self, name: str) -> None:
        self.directory = checkpoint_directory(name)
        self._record = _content(self.directory)
        self._predictor = Predictor.load(name)
        self._metrics = load_metrics(self.directory)
        self._loaded_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._files: tuple[Any, tuple[str, str | None]] = (None, ("same", None))
        if _content(self.directory) != self._record:
            raise UserError(f"expected {self.directory} to stay as it is while it is read, found it changed: try again")

    def answers(self, questions: Sequence[JobQuestion]) -> list[EstimatedJob]:
        """Answer questions; those with the same risk and bucket width share a forward pass."""
        groups: dict[tuple[float, int], list[int]] = {}
        for index, item in enumerate(questions):
            groups.setdefault((item.risk, item.bucket_mib), []).append(index)
        answered: dict[int, EstimatedJob] = {}
        for (risk, bucket_mib), members in groups.items():
            for part in _parts([questions[index] for index in members], members):
                batch = [questions[index].question for index in part]
                for index, answer in zip(part, self._predictor.answers(batch, risk, bucket_mib), strict=True):
                    answered[index] = EstimatedJob(_bounded(answer), self._distribution(questions[index]))
        return [answered[index] for index in range(len(questions))]

    def _distribution(self, question: JobQuestion) -> list[dict[str, Any]] | None:
        if not question.distribution:
            return None
        buckets, shares = self._predictor.bucket_probabilities(question.question, question.bucket_mib, question.risk)
        edges = [*(buckets.edges_bytes / MIB).tolist(), None]
        return [
            {"index": index, "lower_mib": edges[index], "upper_mib": edges[index + 1], "probability": share}
            for index, share in enumerate(shares.tolist())
            if share >= _LEAST_SHARE
        ]

    @property
    def status(self) -> dict[str, Any]:
        """The checkpoint and the state of its files, which are read again only if they changed."""
        on_disk, note = self._on_disk()
        return {
            "name": self.directory.name,
            "content": self._record,
            "loaded_at": self._loaded_at,
            "on_disk": on_disk,
            "note": note,
            "metrics": self._metrics,
        }

    def _on_disk(self) -> tuple[str, str | None]:
        stamps = _stamps(self.directory)
        if stamps != self._files[0]:
            self._files = (stamps, self._compared())
        return self._files[1]

    def _compared(self) -> tuple[str, str | None]:
        if not (self.directory / ESTIMATOR).exists():
            return "missing", f"{self.directory.name} is gone from the disk; answers come from what was loaded"
        try:
            load_checkpoint(self.directory)
            content = _content(self.directory)
        except Exception:  # whatever is wrong with the files; messages have paths, which clients must not see
            return "damaged", f"the files of {self.directory.name} are damaged; answers come from what was loaded"
        if content != self._record:
            return "changed", "another checkpoint lies there now: reload to use it"
        return "same", None


def _parts(questions: Sequence[JobQuestion], members: Sequence[int]) -> list[list[int]]:
    """Split into batches that bound the memory of attention: each is padded to its longest table."""
    parts: list[list[int]] = []
    longest = 0
    for item, index in zip(questions, members, strict=True):
        longest = max(longest, len(item.question.example.layers))
        if not parts or longest**2 * (len(parts[-1]) + 1) > _MOST_ATTENTION:
            parts.append([])
            longest = len(item.question.example.layers)
        parts[-1].append(index)
    return parts


def _content(directory: Path) -> str:
    """Return the hash that a checkpoint states."""
    try:
        return str(json.loads((directory / ESTIMATOR).read_text(encoding="utf-8"))["content"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"expected a checkpoint in {directory}, found none that can be read: name another") from error


def _stamps(directory: Path) -> Mapping[str, tuple[int, int, int]] | None:
    """Return size, time and inode of each file."""
    try:
        stats = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.is_file()}
    except OSError:
        return None
    return {name: (item.st_size, item.st_mtime_ns, item.st_ino) for name, item in stats.items()}


def _bounded(answer: Answer) -> Answer:
    """Bound the figures of an answer: features may describe an impossibly large network. Drop paths of this machine."""
    if math.isnan(answer.estimate_mib) or math.isnan(answer.safe_mib):
        raise UserError("expected a job that can be estimated, found an impossibly large one: check its figures")
    estimate_mib, safe_mib = (min(value, _BEYOND_MIB) for value in (answer.estimate_mib, answer.safe_mib))
    notes = tuple(_PLACE.sub("", note) for note in answer.notes)
    return replace(answer, estimate_mib=estimate_mib, safe_mib=safe_mib, notes=notes)
