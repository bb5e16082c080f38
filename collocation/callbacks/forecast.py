"""The forecast that a real run is compared with, as `vramcast run --json` or `classify --json` printed it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vramcast.errors import UserError
from vramcast.models.answer import Answer


@dataclass(frozen=True)
class Forecast:
    """Figures of an answer, in MiB."""

    allocated_mib: float
    reserved_mib: float
    safe_mib: float
    context_mib: float
    """The CUDA context and libraries, which torch does not count."""
    device: str

    @classmethod
    def of(cls, source: Answer | Mapping[str, Any] | str | Path) -> Self:
        """Read a forecast from an answer, its JSON, or a file with the JSON."""
        if isinstance(source, str | Path):
            values: Any = _read(Path(source))
        else:
            values = source.to_dict() if isinstance(source, Answer) else source
        if isinstance(values, Mapping) and isinstance(values.get("answer"), Mapping):  # of `vramcast check --json`
            values = values["answer"]
        figures: list[Any] = [values.get(name) if isinstance(values, Mapping) else None for name in _FIGURES]
        if not all(_is_amount(figure) for figure in figures) or not isinstance(values.get("device"), str):
            raise UserError(
                f"expected the JSON of vramcast run or classify with {', '.join(_FIGURES)} and a device, found "
                f"{str(source)[:200]!r}: make it with --json"
            )
        context = (values.get("breakdown_mib") or {}).get("context", 0.0)
        allocated, reserved, safe = figures
        return cls(allocated, reserved, safe, float(context), values["device"])


_FIGURES = ("allocated_mib", "reserved_mib", "safe_mib")


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"expected the JSON of a forecast in {path}, found: {error}; make it with --json") from error
