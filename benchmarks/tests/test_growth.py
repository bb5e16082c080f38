"""Growth of cost: the fitted law, the page, and one measurement."""

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
def test_the_exponent_is_fitted_beside_a_constant(exponent):
    law = fit_growth(SIZES, [3.0 + 0.1 * size**exponent for size in SIZES])
    assert law.exponent == pytest.approx(exponent, abs=0.02)
    assert law.constant == pytest.approx(3.0, rel=0.05)
    assert law.at(np.array([500.0]))[0] == pytest.approx(3 + 0.1 * 500**exponent, rel=0.05)


def test_noise_around_a_constant_has_exponent_zero():
    law = fit_growth(SIZES, [1.0, 1.1, 0.98, 1.05])
    assert law.exponent == 0
    assert law.at(np.array([7.0]))[0] == pytest.approx(1.03, abs=0.01)


def test_two_points_have_a_slope():
    assert fit_growth([1, 2], [8.0, 4.0]).exponent == pytest.approx(-1)


def test_all_kinds_and_sizes_are_measured_once():
    measurements = tasks()
    assert {kind for kind, _ in measurements} == {"layers", "parameters", "batch", "cores", "connections"}
    assert ("layers", 10_000) in measurements
    assert ("parameters", 10**12) in measurements
    assert len(measurements) == len(set(measurements))


def made_table():
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


def test_the_page_has_one_line_per_size_and_the_exponent():
    page = render(made_table())
    assert "| 10,000 | 1,000 | 1,000 | 1,000 |" in page
    assert "| *exponent* | 1.00 | 1.00 | 1.00 |" in page
    assert page.count("*exponent*") == 5
    assert figures_of(made_table(), "cores", "seconds") == ([1.0, 2.0], [0.1, 0.2])


def test_the_picture_is_small(tmp_path):
    draw_growth(made_table(), tmp_path / "growth.png")
    assert 10_000 < (tmp_path / "growth.png").stat().st_size < 150_000


def test_an_interrupted_run_resumes_and_failures_are_left_out(tmp_path, monkeypatch, capsys):
    calls = []

    def measure(kind, size):
        calls.append((kind, size))
        if size == 3:
            raise KeyboardInterrupt if calls.count((kind, size)) == 1 else RuntimeError("no port")
        return {"seconds": 0.5 * size}

    monkeypatch.setattr(measuring, "tasks", lambda: [("layers", 1), ("layers", 2), ("layers", 3), ("layers", 4)])
    monkeypatch.setattr(measuring, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure_all(tmp_path / "growth.csv")
    table = measuring.measure_all(tmp_path / "growth.csv")
    assert calls == [("layers", 1), ("layers", 2), ("layers", 3), ("layers", 3), ("layers", 4)]
    assert figures_of(table, "layers", "seconds") == ([1.0, 2.0, 4.0], [0.5, 1.0, 2.0])
    assert "layers 3 was not measured: no port" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["growth.csv"]


def test_a_trace_of_more_layers_takes_longer():
    traced("layers", 2)  # warm up: the first trace of a process also imports
    few, many = traced("layers", 10), traced("layers", 200)
    assert 0 < few["seconds"] < many["seconds"]
    assert few["peak_mib"] <= many["peak_mib"]


def test_strong_noise_has_exponent_zero():
    noisy = [0.168, 0.160, 0.230, 0.216, 0.245, 0.274, 0.150, 0.247]
    assert fit_growth([4**power for power in range(8)], noisy).exponent == 0
