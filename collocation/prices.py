"""The operator's table of prices: YAML with the price of an hour of each device, in any currency."""

from pathlib import Path

from vramcast.device.profiles import device_names
from vramcast.errors import UserError, suggestion
from vramcast.files.yaml_text import parse_yaml


def read_prices(path: Path | None) -> dict[str, float]:
    """Return the price of an hour by device; nothing without a file."""
    if path is None:
        return {}
    try:
        table = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected prices in {path}, found: {error}; check --prices") from error
    if not isinstance(table, dict):
        raise UserError(f"expected lines such as 't4: 0.35' in {path}, found {type(table).__name__}: write them so")
    names = device_names()
    for device, price in table.items():
        if device not in names:
            hint = suggestion(str(device), names, "see vramcast device list")
            raise UserError(f"expected devices in {path}, found {device!r}: {hint}")
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < float("inf"):
            raise UserError(f"expected the price of an hour of {device} in {path}, found {price!r}: write a number")
    return {str(device): float(price) for device, price in table.items()}
