"""Progress bars: updated often on a terminal and rarely in a log."""

import sys

import pytest

from vramcast.progress import bar


@pytest.mark.parametrize(("terminal", "seconds"), [(True, 0.1), (False, 10.0)])
def test_a_bar_is_updated_rarely_in_a_log(terminal, seconds, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with bar(total=3, unit="row") as shown:
        assert shown.mininterval == seconds
    assert list(bar("ab", unit="letter")) == ["a", "b"]
