"""The answer for one job on one device, in one form for the command line, Python and the service."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from vramcast.models.json_figures import rounded

FITS, TIGHT, TOO_LARGE, INCOMPLETE = "fits", "tight", "does not fit", "incomplete"


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The predicted class of memory. `upper_mib` is None for the last one, which holds all jobs that do not fit."""

    index: int
    lower_mib: float
    upper_mib: float | None
    probability: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How much of a device a job will use, and whether it fits. The figures are simulated and learned, not measured."""

    target: str
    batch_size: int
    device: str
    bucket: Bucket
    estimate_mib: float
    """The point estimate on the device; for a job that does not fit, its need on a device without a memory limit."""
    safe_mib: float
    """The amount to reserve, which is enough but for a share `risk` of jobs; more than the device has if none fits."""
    allocated_mib: float | None
    """The simulated peak in torch's allocator, and below what it reserves; None for a layer table alone."""
    reserved_mib: float | None
    capacity_mib: float
    """Memory of the device for all jobs and their overheads."""
    oom_probability: float
    risk: float
    out_of_distribution: bool
    checkpoint: str
    profile: str
    """The device profile, and whether it was calibrated on measurements."""
    seconds: float
    breakdown_mib: Mapping[str, float] = field(default_factory=dict)
    """Memory by use at the peak; empty for a layer table alone."""
    max_batch_size: int | None = None
    """The largest batch whose safe figure fits; None if it was not searched for, 0 if none fits."""
    notes: tuple[str, ...] = ()
    """Approximations and limits that a reader must know."""
    inputs: tuple[Mapping[str, Any], ...] = ()
    """Shape (without the batch) and dtype of each input of the network."""
    traced_with: Mapping[str, str] = field(default_factory=dict)
    """Versions of torch and of the network's libraries; empty for a layer table alone."""
    parallel: str | None = None
    """The strategy for several GPUs; the figures are those of the largest rank."""
    ranks: tuple[Mapping[str, Any], ...] = ()
    """The distinct ranks of a run on several GPUs: one rank, how many are like it, and its simulated peaks."""
    strategies: tuple[Mapping[str, Any], ...] = ()
    """Other strategies for the same GPUs, and the least number of GPUs that fits."""
    missing: tuple[str, ...] = ()
    """Phases of a script that its run did not reach: the figures are those of the others, and no risk is stated."""
    lengths: Mapping[str, float] = field(default_factory=dict)
    """With lengths of samples: percentiles over the batches, and the share of batches that fits safely."""

    @property
    def fits(self) -> bool:
        """True if the point estimate is below the capacity."""
        return self.estimate_mib < self.capacity_mib

    @property
    def verdict(self) -> str:
        """'fits' if the safe figure fits, 'tight' if only the point estimate does, else 'does not fit'.

        'incomplete' in the place of 'fits' where a phase is missing.
        """
        if not self.fits:
            return TOO_LARGE
        if self.missing and self.safe_mib <= self.capacity_mib:
            return INCOMPLETE
        return FITS if self.safe_mib <= self.capacity_mib else TIGHT

    def to_dict(self) -> dict[str, Any]:
        """Return all fields with `fits` and `verdict` as plain values for JSON, rounded to what they mean."""
        values = dict(vars(self))
        for name in ("lengths", "missing"):
            if not values[name]:
                del values[name]
        values.update(ranks=[dict(item) for item in self.ranks], strategies=[dict(i) for i in self.strategies])
        if self.parallel is None:
            for name in ("parallel", "strategies") if self.ranks else ("parallel", "ranks", "strategies"):
                del values[name]
        values = {
            "status": "ok",
            **values,
            "bucket": vars(self.bucket),
            "breakdown_mib": self.breakdown_mib,
            "notes": list(self.notes),
            "inputs": [dict(item) for item in self.inputs],
            "traced_with": dict(self.traced_with),
            "fits": self.fits,
            "verdict": self.verdict,
        }
        return dict(rounded(values))

    def __str__(self) -> str:
        title, *rows = self._rows()
        return "\n".join([" ".join(title), *(f"  {name:10} {text}" for name, text in rows)])

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        title, *rows = self._rows()
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
        return f"<table><caption>{escape(' '.join(title))}</caption>{cells}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        """Return the title, then a name and a text for each line."""
        rows = [
            (f"{self.target}, batch {self.batch_size}, on {self.device}:", self.verdict),
            ("estimate", f"{shown_size(self.estimate_mib)} of {shown_size(self.capacity_mib)}"),
            ("safe", f"{shown_size(self.safe_mib)}, {shown_risk(self)}"),
        ]
        if self.inputs:
            rows.append(("input", shown_inputs(self.inputs)))
        if self.traced_with:
            rows.append(("traced", f"with {shown_versions(self.traced_with)}"))
        return [*rows, *(("note", note) for note in self.notes)]


def shown_size(mib: float) -> str:
    """Return a size in MiB or GiB."""
    return f"{mib / 1024:,.1f} GiB" if mib >= 1024 else f"{mib:,.0f} MiB"


def shown_risk(answer: Answer) -> str:
    """Return how often a safe figure is enough; where a phase is missing, nobody knows."""
    if answer.missing:
        others = len(answer.missing) - 1
        more = f" and {others} more" if others else ""
        return f"for what was seen: {answer.missing[0]}{more} was not reached, so that no risk is stated"
    return f"enough in {100 * (1 - answer.risk):.4g} % of cases"


def shown_inputs(inputs: tuple[Mapping[str, Any], ...]) -> str:
    """Return the shapes of inputs, or the sequence length of a language model."""
    lengths = {tuple(item["shape"]) for item in inputs if item["dtype"] == "int64" and len(item["shape"]) == 1}
    if len(lengths) == 1 and all(item["dtype"] == "int64" for item in inputs):
        return f"sequence length {lengths.pop()[0]}"
    return ", ".join("x".join(map(str, item["shape"])) or "scalar" for item in inputs)


def shown_versions(versions: Mapping[str, str]) -> str:
    """Return 'torch 2.9.0, timm 1.0.20'."""
    return ", ".join(f"{name} {number}" for name, number in versions.items())
