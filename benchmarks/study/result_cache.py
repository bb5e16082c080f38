"""Figures by the settings that decide them, in a file: a study that was stopped goes on where it was."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vramcast.models.simulation import source_hash
from vramcast.virtual_gpu.records import content_hash


class ResultCache:
    """A line of JSON for each figure. Figures of another state of the virtual GPU count as absent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.found = dict(_read(text))
        self.torn = bool(text) and not text.endswith("\n")

    def get(self, settings: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """What was computed for these settings, or is computed now and kept."""
        key = content_hash({**settings, "source": source_hash()})
        if key not in self.found:
            self.found[key] = compute()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(
                    "\n" * self.torn + json.dumps({"key": key, "settings": settings, "figures": self.found[key]}) + "\n"
                )
            self.torn = False
        return self.found[key]


def _read(text: str) -> Iterator[tuple[str, Any]]:
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:  # a process that is killed while it writes leaves half a line
            continue
        yield found["key"], found["figures"]
