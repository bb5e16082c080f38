"""How cost grows: the fitted law, the page, and one measurement."""

import numpy as np
import pandas as pd
import pytest

from benchmarks.performance.growth import measuring
from benchmarks.performance.growth.child import traced
from benchmarks.performance.growth.fitting import fit_growth
from benchmarks.performance.growth.measuring import CONNECTIONS, LAYERS, figures_of, tasks
from benchmarks.performance.growth.page import render
from benchmarks.performance.growth.pictures import draw_growth

SIZES = [10, 100, 1000, 10_000]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_what_grows(exponent):
    law = fit_growth(SIZES, [3.0 + 0.1 * size**exponent for size in SIZES])
    assert law.exponent == pytest.approx(exponent, abs=0.02)
    assert law.constant == pytest.approx(3.0, rel=0.05)
    assert law.at(np.array([500.0]))[0] == pytest.approx(3 + 0.1 * 500**exponent, rel=0.05)


def test_noise_around_a_constant_is_no_growth():
    law = fit_growth(SIZES, [1.0, 1.1, 0.98, 1.05])
    assert law.exponent == 0
    assert law.at(np.array([7.0]))[0] == pytest.approx(1.03, abs=0.01)


def test_two_points_have_a_slope():
    assert fit_growth([1, 2], [8.0, 4.0]).exponent == pytest.approx(-1)


def test_all_kinds_are_measured_from_the_least_size_to_the_most():
    found = tasks()
    assert {kind for kind, _ in found} == {"layers", "parameters", "batch", "cores", "connections"}
    assert ("layers", 10_000) in found
    assert ("parameters", 10**12) in found
    assert len(found) == len(set(found))


def made():
    lines = []
    for kind, figures in (
        ("layers", ("seconds", "grown_mib", "peak_mib")), ("parameters", ("seconds", "grown_mib", "peak_mib")),
        ("batch", ("seconds", "grown_mib", "peak_mib")), ("cores", ("seconds", "rows_a_second")),
        ("connections", ("p50_ms", "p99_ms", "requests_a_second")),
    ):  # fmt: skip
        sizes = {"cores": (1, 2), "connections": CONNECTIONS}.get(kind, LAYERS)
        lines += [
            {"kind": kind, "size": size, "figure": name, "value": 0.1 * size} for name in figures for size in sizes
        ]
    return pd.DataFrame(lines)


def test_the_page_has_a_line_for_each_size_and_the_exponent():
    page = render(made())
    assert "| 10,000 | 1,000 | 1,000 | 1,000 |" in page
    assert "| *exponent* | 1.00 | 1.00 | 1.00 |" in page
    assert page.count("*exponent*") == 5
    assert figures_of(made(), "cores", "seconds") == ([1.0, 2.0], [0.1, 0.2])


def test_the_picture_is_drawn_and_small(tmp_path):
    draw_growth(made(), tmp_path / "growth.png")
    assert 10_000 < (tmp_path / "growth.png").stat().st_size < 150_000


def test_a_run_that_was_stopped_goes_on_and_what_fails_is_left_out(tmp_path, monkeypatch, capsys):
    asked = []

    def measure(kind, size):
        asked.append((kind, size))
        if size == 3:
            raise KeyboardInterrupt if asked.count((kind, size)) == 1 else RuntimeError("no port")
        return {"seconds": 0.5 * size}

    monkeypatch.setattr(measuring, "tasks", lambda: [("layers", 1), ("layers", 2), ("layers", 3), ("layers", 4)])
    monkeypatch.setattr(measuring, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure_all(tmp_path / "growth.csv")
    table = measuring.measure_all(tmp_path / "growth.csv")
    assert asked == [("layers", 1), ("layers", 2), ("layers", 3), ("layers", 3), ("layers", 4)]
    assert figures_of(table, "layers", "seconds") == ([1.0, 2.0, 4.0], [0.5, 1.0, 2.0])
    assert "layers 3 was not measured: no port" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["growth.csv"]


def test_a_trace_of_more_layers_takes_longer():
    traced("layers", 2)  # the first one in a process also imports
    few, many = traced("layers", 10), traced("layers", 200)
    assert 0 < few["seconds"] < many["seconds"]
    assert few["peak_mib"] <= many["peak_mib"]


def test_noise_does_not_grow():
    noisy = [0.168, 0.160, 0.230, 0.216, 0.245, 0.274, 0.150, 0.247]
    assert fit_growth([4**power for power in range(8)], noisy).exponent == 0
