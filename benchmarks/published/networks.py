"""Configurations of the networks in published tables, from their public `config.json`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).resolve().parent / "networks.json"


@cache
def _all() -> dict[str, dict[str, Any]]:
    networks: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return networks


def network(name: str) -> dict[str, Any]:
    """Return the configuration of a network."""
    return _all()[name]
