"""Flat tables of the rows for pandas, spreadsheets, and other readers of CSV or Parquet."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pandas as pd

from vramcast.dataset_builder.rows import Provenance, Row
from vramcast.dataset_builder.store.reader import collector_paused
from vramcast.errors import UserError
from vramcast.files.durable import replacing
from vramcast.jobs.spec import StaticEstimate
from vramcast.virtual_gpu.canonical import canonical_json
from vramcast.virtual_gpu.measurement import Measurement
from vramcast.virtual_gpu.training.setup import TrainingSetup

# The nullable pandas types.
_DTYPES: Mapping[type, str] = {bool: "boolean", int: "Int64", float: "Float64", str: "string"}


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a table with a line for each row; it has all columns of the schema even if they are empty."""
    with collector_paused():
        records = [_flatten(row) for row in rows]
        names = {name for record in records for name in record}
        columns: dict[str, Any] = {}
        for name, dtype in _layout(names).items():
            values = [record.get(name) for record in records]
            columns[_printable(name)] = _typed(values, dtype or _common_dtype(values))
        return pd.DataFrame(columns)


def write_view(frame: pd.DataFrame, path: Path | str) -> None:
    """Write a table as .csv or .parquet, atomically."""
    path = Path(path)
    writers: Mapping[str, Callable[[Path], None]] = {
        # Line ends of RFC 4180, which also make the csv module of Python 3.11 quote a carriage return.
        ".csv": lambda target: frame.to_csv(target, index=False, lineterminator="\r\n"),
        ".parquet": lambda target: frame.to_parquet(target, index=False),
    }
    if path.suffix not in writers:
        raise UserError(f"expected a view named *.csv or *.parquet, found {path.name!r}: rename it")
    with replacing(path) as temporary:
        writers[path.suffix](temporary)


def _flatten(row: Row) -> dict[str, Any]:
    spec, measurement, static = row.spec, row.measurement, row.static
    return {
        "id": spec.id,
        "group": spec.group,
        "family": spec.family,
        **{f"network.{name}": value for name, value in spec.network.items()},
        **_members("training.", spec.training),
        **(_members("static.", static) if static else {}),
        "static.total_bytes": static.total_bytes if static else None,
        **_members("", measurement),
        "peak_bytes": measurement.peak_bytes,
        **{f"breakdown.{name}": value for name, value in measurement.breakdown.items()},
        **_members("provenance.", row.provenance),
        **{f"needs.{device}.{name}": getattr(item, name) for device, item in row.needs.items() for name in _NEEDED},
    }


_NEEDED = ("status", "allocated_bytes", "reserved_bytes", "device_used_bytes")
"""Columns of what a row needs on other devices."""


def _members(prefix: str, instance: Any) -> dict[str, Any]:
    return {column: getattr(instance, name) for column, name in _names(prefix, instance.__class__)}


@cache
def _names(prefix: str, kind: Any) -> tuple[tuple[str, str], ...]:
    return tuple((prefix + item.name, item.name) for item in fields(kind))


def _layout(names: set[str]) -> dict[str, str | None]:
    """Return columns in reading order with their dtype; None where it depends on the values."""
    breakdown = sorted(name for name in names if name.startswith("breakdown."))
    return {
        **dict.fromkeys(("id", "group", "family"), "string"),
        **dict.fromkeys(sorted(name for name in names if name.startswith("network."))),
        **_dtypes("training.", TrainingSetup),
        **_dtypes("static.", StaticEstimate),
        "static.total_bytes": "Int64",
        **{name: dtype for name, dtype in _dtypes("", Measurement).items() if name != "breakdown"},
        "peak_bytes": "Int64",
        **dict.fromkeys(breakdown, "Int64"),
        **_dtypes("provenance.", Provenance),
        **{
            name: "string" if name.endswith(".status") else "Int64"
            for name in sorted(names)
            if name.startswith("needs.")
        },
    }


def _dtypes(prefix: str, kind: type) -> dict[str, str | None]:
    """Return the columns of a dataclass with dtypes from its annotations; compound values become text."""
    result: dict[str, str | None] = {}
    for item in fields(kind):
        annotation: Any = get_args(item.type)[0] if isinstance(item.type, UnionType) else item.type
        result[prefix + item.name] = _DTYPES.get(annotation, "string")
    return result


def _common_dtype(values: Sequence[Any]) -> str:
    """Return the narrowest dtype that holds all values: families may use one name for values of different types."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return "Float64"
    return _DTYPES.get(kinds.pop(), "string") if len(kinds) == 1 else "string"


def _typed(values: Sequence[Any], dtype: Any) -> Any:
    if dtype == "Int64" and any(value is not None and abs(value) >= 2**63 for value in values):
        dtype = "string"  # such as an unsigned 64-bit seed
    if dtype == "string":
        return pd.array([_text(value) for value in values], dtype="string")
    return pd.array(values, dtype=dtype)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        value = dict(value)
    return _printable(value if isinstance(value, str) else canonical_json(value))


def _printable(text: str) -> str:
    """Escape lone surrogates, which neither CSV nor Parquet can store."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
