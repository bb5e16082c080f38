"""A simulation: what the virtual GPU found for a job, in a form that passes through a pipe as JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from vramcast.jobs.spec import LayerTable
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup


@dataclass(frozen=True)
class LayerCost:
    """The memory that one layer holds at the peak."""

    name: str
    kind: str
    held_bytes: Mapping[str, int]
    """By use."""

    @property
    def total_bytes(self) -> int:
        """The sum over all uses."""
        return sum(self.held_bytes.values())


@dataclass(frozen=True)
class OrderPeaks:
    """The reserved memory of runs whose batches of varying lengths come in several orders, on one device."""

    reserved_bytes: tuple[int | None, ...] = ()
    """By order; None for a run that runs out of memory. Empty if the orders cannot be replayed."""
    expandable_bytes: int | None = None
    """With expandable segments and the first order."""
    reason: str | None = None
    """Why the orders cannot be replayed."""
    longest_bytes: int = 0
    """The peak of a run whose batches all have the greatest length: the need of the job beside its cache."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the fields of an instance."""
        return cls(**{**values, "reserved_bytes": tuple(values["reserved_bytes"])})


@dataclass(frozen=True)
class Peaks:
    """The peaks of a job on one device."""

    bounded: Measurement
    unbounded: Measurement | None = None
    """On the device without a memory limit: the need of a job that does not fit. None if it was not replayed."""
    orders: OrderPeaks | None = None
    """None unless batches vary in length; the measurements are then those of the median order."""


@dataclass(frozen=True)
class RankPeaks:
    """The unbounded peaks of ranks that are alike, on the first device."""

    rank: int
    """One of them."""
    count: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Simulation:
    """A job under one training setup, on some devices."""

    table: LayerTable
    training: TrainingSetup
    """As traced, with the loss and the optimizer that the network brings."""
    peaks: Mapping[str, Peaks]
    """By device."""
    costs: tuple[LayerCost, ...] = ()
    """At the unbounded peak on the first device, the largest first."""
    family: str | None = None
    notes: tuple[str, ...] = ()
    """Statements of an answer besides the notes of its peaks, which are assumptions."""
    inputs: tuple[Mapping[str, Any], ...] = ()
    """Shape (without the batch) and dtype of each input."""
    traced_with: Mapping[str, str] = field(default_factory=dict)
    """Versions of torch and of the libraries that the network comes from."""
    ranks: tuple[RankPeaks, ...] = ()
    """The distinct ranks of a run on several GPUs, the largest first; `peaks` are those of the first."""

    def to_json(self) -> dict[str, Any]:
        """Return a mapping that `from_json` reads."""
        return {
            "table": self.table.to_json(),
            "training": dict(vars(self.training)),
            "peaks": {
                device: {
                    "bounded": dict(vars(item.bounded)),
                    "unbounded": None if item.unbounded is None else dict(vars(item.unbounded)),
                    "orders": None if item.orders is None else dict(vars(item.orders)),
                }
                for device, item in self.peaks.items()
            },
            "costs": [[item.name, item.kind, dict(item.held_bytes)] for item in self.costs],
            "family": self.family,
            "notes": list(self.notes),
            "inputs": [dict(item) for item in self.inputs],
            "traced_with": dict(self.traced_with),
            "ranks": [vars(item) for item in self.ranks],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping that `to_json` wrote."""
        return cls(
            table=LayerTable.from_json(values["table"]),
            training=TrainingSetup(**values["training"]),
            peaks={
                device: Peaks(
                    _measurement(item["bounded"]),
                    _measurement(item["unbounded"]) if item["unbounded"] else None,
                    OrderPeaks.from_json(item["orders"]) if item.get("orders") else None,
                )
                for device, item in values["peaks"].items()
            },
            costs=tuple(LayerCost(*item) for item in values["costs"]),
            family=values["family"],
            notes=tuple(values["notes"]),
            inputs=tuple(values["inputs"]),
            traced_with=values["traced_with"],
            ranks=tuple(RankPeaks(**item) for item in values["ranks"]),
        )


def with_orders(simulation: Simulation, device: str, orders: OrderPeaks) -> Simulation:
    """Return the simulation of a run whose batches vary in length, from that of its longest batch alone.

    The peaks on the device become those of the median order, and none is below that of the longest batch.
    """
    peaks = simulation.peaks[device]
    longest = (peaks.unbounded or peaks.bounded).reserved_bytes or 0
    raised = tuple(None if item is None else max(item, longest) for item in orders.reserved_bytes)
    ordered = sorted(raised, key=lambda item: math.inf if item is None else item)
    median = ordered[len(ordered) // 2]
    if median is None:
        varied = Peaks(replace(peaks.bounded, status=Status.OOM), peaks.unbounded)
    else:
        unbounded = None if peaks.unbounded is None else _with_reserved(peaks.unbounded, median)
        varied = Peaks(_with_reserved(peaks.bounded, median), unbounded)
    varied = replace(varied, orders=replace(orders, reserved_bytes=raised, longest_bytes=longest))
    return replace(simulation, peaks={**simulation.peaks, device: varied})


def _with_reserved(measurement: Measurement, reserved_bytes: int) -> Measurement:
    """Return a measurement with another reserved peak: what it has more is cache."""
    more = reserved_bytes - (measurement.reserved_bytes or 0)
    cache = measurement.breakdown.get("allocator_cache", 0) + more
    return replace(
        measurement,
        status=Status.OK,
        reserved_bytes=reserved_bytes,
        device_used_bytes=(measurement.device_used_bytes or 0) + more,
        breakdown={**measurement.breakdown, "allocator_cache": cache},
    )


def _measurement(values: Mapping[str, Any]) -> Measurement:
    return Measurement(**{**values, "status": Status(values["status"]), "notes": tuple(values["notes"])})


@dataclass(frozen=True)
class Curve:
    """Memory over the course of a training run, reduced to a few hundred points."""

    requested_bytes: Mapping[str, list[int]] = field(default_factory=dict)
    """By use."""
    reserved_bytes: list[int] = field(default_factory=list)
    context_bytes: int = 0
    capacity_bytes: int = 0
    """Of the device, without what its driver keeps."""
