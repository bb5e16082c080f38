"""Bars: often for people, seldom for logs."""

import sys

import pytest

from vramcast.dataset_builder.progress import bar


@pytest.mark.parametrize(("watched", "seconds"), [(True, 0.1), (False, 10.0)])
def test_a_bar_is_drawn_seldom_where_nobody_looks_on(watched, seconds, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched, raising=False)
    with bar(total=3, unit="row") as shown:
        assert shown.mininterval == seconds
    assert list(bar("ab", unit="letter")) == ["a", "b"]
