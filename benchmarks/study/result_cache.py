"""Caches the figures of a study in a file, so that an interrupted study resumes."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.simulation_store import simulation_versions
from vramcast.virtual_gpu.canonical import content_hash


class ResultCache:
    """A JSON Lines file of figures by settings. Figures of another version of the virtual GPU are ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.figures = dict(_read(text))
        self.truncated = bool(text) and not text.endswith("\n")

    def get(self, settings: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """Return the figures for these settings; compute and store them if they are missing."""
        key = content_hash({**settings, "versions": simulation_versions()})
        if key not in self.figures:
            self.figures[key] = compute()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            record = json.dumps({"key": key, "settings": settings, "figures": self.figures[key]})
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * self.truncated + record + "\n")
            self.truncated = False
        return self.figures[key]


def _read(text: str) -> Iterator[tuple[str, Any]]:
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # a killed process leaves half a line
            continue
        yield record["key"], record["figures"]
