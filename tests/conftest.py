"""What several test files share."""

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# Before anything imports torch: two test processes with two threads each get in each other's way on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests to inherit live in modules of their own, whose asserts should speak as clearly as others.
pytest.register_assert_rewrite("estimator_contract")

DATA = Path(os.environ.get("VRAMCAST_DATA", Path(__file__).parents[2] / "shared" / "data"))

# For properties that run torch: slow examples, and the same ones every time.
settings.register_profile(
    "torch",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def public_table() -> Callable[[str], Path]:
    """The path of a table of the public measurements; where it is absent the test is skipped."""

    def locate(name: str) -> Path:
        if not (DATA / name).exists():
            pytest.skip(f"no {name} in {DATA}: set VRAMCAST_DATA to the directory of the public measurements")
        return DATA / name

    return locate


@pytest.fixture
def public_rows(public_table: Callable[[str], Path]) -> Callable[[str], list[dict[str, str]]]:
    """The lines of a table of the public measurements."""

    def read(name: str) -> list[dict[str, str]]:
        with public_table(name).open(newline="") as lines:
            return list(csv.DictReader(lines))

    return read


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what is in the file, not of when it is on the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
