"""The loaded checkpoint: answers to batches of questions, and whether its files are still what was loaded."""

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from vramcast.collocation.observed_peak import ObservedPeak, reservation_bytes
from vramcast.errors import UserError
from vramcast.models.answer import TIGHT, Answer
from vramcast.models.checkpoint import checkpoint_directory, load_checkpoint, load_metrics
from vramcast.models.predictor import Predictor, Question
from vramcast.models.storage import ESTIMATOR
from vramcast.virtual_gpu.sizes import MIB

_LEAST_SHARE = 0.0005
"""Buckets below are left out of a distribution: there may be two hundred of them."""
_BEYOND_MIB = 2.0**30
"""A pebibyte, for whatever is more."""
_MOST_ATTENTION = 1 << 24
"""Pairs of layers in one forward pass: attention looks at all of them at once."""


@dataclass(frozen=True)
class Asked:
    """A question with what its asker wants to know."""

    question: Question
    risk: float
    bucket_mib: int
    distribution: bool = False


@dataclass(frozen=True)
class Seen:
    """A job that ran on a device before: what to set aside for it needs no forecast."""

    device: str
    capacity_mib: float
    observed: ObservedPeak
    basis: str = "observed"

    @property
    def set_aside_mib(self) -> float:
        """What ran on a card needs no more than all of it, and no less than it took, whatever the profile says."""
        with_margin_mib = reservation_bytes(self.observed.peak_bytes) / MIB
        return max(min(with_margin_mib, self.capacity_mib), self.observed.peak_bytes / MIB)

    @property
    def need_mib(self) -> float:
        """The same: there is nothing to be unsure of."""
        return self.set_aside_mib


@dataclass(frozen=True)
class Estimated:
    """The answer, the probability of each bucket if it was asked for, and what was seen of the job before."""

    answer: Answer
    distribution: list[dict[str, Any]] | None = None
    observed: ObservedPeak | None = None
    """What was seen of the job on that device."""

    @property
    def device(self) -> str:
        """The profile that it is about."""
        return self.answer.device

    @property
    def basis(self) -> str:
        """Where the figure to set aside comes from."""
        return "observed" if self.observed else "forecast"

    @property
    def need_mib(self) -> float:
        """What to set aside: what the job took before and a margin, else the safe answer."""
        if self.observed is None:
            return self.answer.safe_mib
        return Seen(self.device, self.answer.capacity_mib, self.observed).set_aside_mib

    @property
    def set_aside_mib(self) -> float:
        """For schedulers that turn the figure into a request: one above the card would keep a job waiting for good.

        A job that is likely to fit, if not safely, gets the whole card: alone there, it has the best chance there is.
        """
        tight = self.observed is None and self.answer.verdict == TIGHT
        return self.answer.capacity_mib if tight else self.need_mib

    def to_json(self) -> dict[str, Any]:
        """As it goes over the wire: the forecast as it is without observations, and beside it what was seen."""
        return {
            **self.answer.to_dict(),
            "distribution": self.distribution,
            "need_mib": self.need_mib,
            "basis": self.basis,
            "observed": observed_json(self.observed) if self.observed else None,
        }


def observed_json(observed: ObservedPeak) -> dict[str, Any]:
    """What was seen of a job, as it goes over the wire."""
    return {"runs": observed.runs, "peak_mib": observed.peak_bytes / MIB}


class Estimating(Protocol):
    """What the service wants of a checkpoint."""

    @property
    def status(self) -> dict[str, Any]:
        """As /readyz and /v1/checkpoints tell it."""

    def answers(self, asked: Sequence[Asked]) -> list[Estimated]:
        """An answer to each question."""


class Checkpoint:
    """One checkpoint, read once; what happens to its files later does not concern its answers."""

    def __init__(self, name: str) -> None:
        self.directory = checkpoint_directory(name)
        self._record = _content(self.directory)
        self._predictor = Predictor.load(name)
        self._metrics = load_metrics(self.directory)
        self._loaded_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._seen: tuple[Any, tuple[str, str | None]] = (None, ("same", None))
        if _content(self.directory) != self._record:
            raise UserError(f"expected {self.directory} to stay as it is while it is read, found it changed: try again")

    def answers(self, asked: Sequence[Asked]) -> list[Estimated]:
        """Those of one risk and width go through the network together."""
        groups: dict[tuple[float, int], list[int]] = {}
        for index, item in enumerate(asked):
            groups.setdefault((item.risk, item.bucket_mib), []).append(index)
        found: dict[int, Estimated] = {}
        for (risk, bucket_mib), members in groups.items():
            for part in _parts([asked[index] for index in members], members):
                questions = [asked[index].question for index in part]
                for index, answer in zip(part, self._predictor.answers(questions, risk, bucket_mib), strict=True):
                    found[index] = Estimated(_bounded(answer), self._distribution(asked[index]))
        return [found[index] for index in range(len(asked))]

    def _distribution(self, asked: Asked) -> list[dict[str, Any]] | None:
        if not asked.distribution:
            return None
        buckets, shares = self._predictor.distribution(asked.question, asked.bucket_mib)
        edges = [*(buckets.edges_bytes / MIB).tolist(), None]
        return [
            {"index": index, "lower_mib": edges[index], "upper_mib": edges[index + 1], "probability": share}
            for index, share in enumerate(shares.tolist())
            if share >= _LEAST_SHARE
        ]

    @property
    def status(self) -> dict[str, Any]:
        """What it is, and what became of its files; they are read again only when they changed."""
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
        if stamps != self._seen[0]:
            self._seen = (stamps, self._compared())
        return self._seen[1]

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


def _parts(asked: Sequence[Asked], members: Sequence[int]) -> list[list[int]]:
    """Batches in which attention over layers stays within bounds: each is padded to its longest."""
    parts: list[list[int]] = []
    longest = 0
    for item, index in zip(asked, members, strict=True):
        longest = max(longest, len(item.question.example.layers))
        if not parts or longest**2 * (len(parts[-1]) + 1) > _MOST_ATTENTION:
            parts.append([])
            longest = len(item.question.example.layers)
        parts[-1].append(index)
    return parts


def _content(directory: Path) -> str:
    """The hash that a checkpoint states of itself."""
    try:
        return str(json.loads((directory / ESTIMATOR).read_text(encoding="utf-8"))["content"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"expected a checkpoint in {directory}, found none that can be read: name another") from error


def _stamps(directory: Path) -> Mapping[str, tuple[int, int, int]] | None:
    """Size, time and inode of each file."""
    try:
        found = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.is_file()}
    except OSError:
        return None
    return {name: (item.st_size, item.st_mtime_ns, item.st_ino) for name, item in found.items()}


def _bounded(answer: Answer) -> Answer:
    """Figures that JSON and schedulers can take: features may describe a network beyond all measure."""
    if math.isnan(answer.estimate_mib) or math.isnan(answer.safe_mib):
        raise UserError("expected a job that can be estimated, found one beyond all measure: check its figures")
    estimate_mib, safe_mib = (min(value, _BEYOND_MIB) for value in (answer.estimate_mib, answer.safe_mib))
    return replace(answer, estimate_mib=estimate_mib, safe_mib=safe_mib)
