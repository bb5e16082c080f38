"""The comparison with the field: figures computed by hand, and their Markdown and CSV."""

import json
import sys
from math import inf

import numpy as np
import pandas as pd
import pytest
from made_examples import CARD_BYTES, MIB, example_of, mlp_table
from synthetic_examples import example_of as example_of_spec
from synthetic_examples import mlp_spec

from benchmarks.field import __main__ as field_command
from benchmarks.field.estimators import FAKE, TABLE, TRACE, TRACKED, Entry, SafeBucket, in_order, supported_by
from benchmarks.field.page import COLUMNS, MAKER, parts
from benchmarks.field.pictures import draw_all, errors_table, scatter_table, unseen_table_of
from benchmarks.field.published import Published, fold_lines
from benchmarks.field.rows import TITLES, UNSEEN, UNSEEN_2024, EvaluatedRow, Field
from benchmarks.field.tables import OVERALL, Line, error_table, line_of, predict, to_frame
from benchmarks.field.timing import seconds_of
from benchmarks.field.tracked import Tracked, in_sample, tracked_figures, tracked_mib
from vramcast.device.profiles import load_profile
from vramcast.models.baselines.horus import Horus
from vramcast.models.baselines.majority import Majority


def example(name, used_mib, fits=True):
    return example_of(mlp_table(2, 2), used_bytes=used_mib * MIB, fits=fits, name=name)


EXAMPLES = [example("right", 1500), example("low", 2500), example("high", 4000), example("died", 39_000, fits=False)]
FIXED = Tracked({"right": 1600, "low": 1900, "high": 5000, "died": 50_000})
EVERY = np.ones(4, dtype=bool)
TEMPLATE = Line(part=OVERALL, estimator="fixed", group="field", figure="computed", rows=None, seconds=0.5)


def test_a_line_has_the_figures_of_its_rows():
    line = line_of(predict(FIXED, EXAMPLES, EVERY), EVERY, TEMPLATE)
    assert line.rows == 4
    errors = sorted([100 / 1500, 600 / 2500, 1000 / 4000])
    assert line.median_error == pytest.approx(errors[1])
    assert line.mean_error == pytest.approx(sum(errors) / 3)
    assert line.p95_error == pytest.approx(errors[2])
    assert (line.accuracy_1000, line.accuracy_2000, line.accuracy_8000) == (0.5, 0.75, 1.0)
    assert line.too_low == 0.25
    assert line.over_reservation_mib == pytest.approx(np.mean([2000 - 1500, 2000 - 2500, 6000 - 4000]))
    assert line.seconds == 0.5


def test_a_line_counts_only_the_rows_that_the_estimator_supports():
    supported = np.array([True, False, True, False])
    predictions = predict(Tracked({"right": 1600, "high": 5000}), EXAMPLES, supported)
    assert line_of(predictions, EVERY, TEMPLATE).rows == 2
    assert line_of(predictions, np.array([True, True, False, False]), TEMPLATE).accuracy_1000 == 1.0
    assert line_of(predictions, ~supported, TEMPLATE) is None
    assert np.isnan(predictions.point_bytes[1])
    assert predictions.point_bytes[2] == 5000 * MIB


def test_an_upper_edge_belongs_to_the_bucket_below_it():
    edges = Published("GPUMemNet", {"right": 8000, "low": 8000, "high": 8000, "died": 48_000})
    line = line_of(predict(edges, EXAMPLES, EVERY), EVERY, TEMPLATE, narrowest_mib=8000)
    assert (line.accuracy_1000, line.accuracy_2000, line.accuracy_8000) == (None, None, 1.0)
    assert line.too_low == 0.0
    assert line.over_reservation_mib == pytest.approx(8000 - np.mean([1500, 2500, 4000]))


def test_the_safe_bucket_is_an_estimator():
    class Ensemble:
        def safe_bytes(self, examples, risk):
            return np.array([item.measured.used_bytes * (1 + risk) for item in examples])

    safe = SafeBucket(Ensemble(), 0.01)
    assert safe.predict_bytes(EXAMPLES[:1])[0] == pytest.approx(1515 * MIB)
    assert safe.used_bytes(EXAMPLES[0]) == pytest.approx(1515 * MIB)


def test_the_table_of_errors_has_all_estimators_and_marks_the_best():
    def line(estimator, part, error, rows=1200):
        return Line(part=part, estimator=estimator, group="field", figure="computed", rows=rows, mean_error=error)

    lines = [line("worse", OVERALL, 0.5), line("better", OVERALL, 0.001), line("better", "mlp", 0.2)]
    table = error_table([*lines, line("few rows", OVERALL, 0.0, rows=3)], {OVERALL: "all", "mlp": "MLPs"}).splitlines()
    cells = [[cell.strip() for cell in text.strip("|").split("|")] for text in table]
    assert cells[0] == ["estimator", "all", "MLPs"]
    assert cells[2:] == [
        ["rows", "1,200", "1,200"],
        ["worse", "50%", "-"],
        ["better", "**0.10%**", "**20%**"],
        ["few rows", "0.00%", "-"],
    ]


def test_the_csv_has_a_column_for_each_figure(tmp_path):
    frame = to_frame([line_of(predict(FIXED, EXAMPLES, EVERY), EVERY, TEMPLATE), *fold_lines()])
    frame.to_csv(tmp_path / "field.csv", index=False)
    again = pd.read_csv(tmp_path / "field.csv")
    assert list(again.columns[:5]) == ["part", "estimator", "group", "figure", "rows"]
    assert again["accuracy_8000"][0] == 1.0
    assert set(again["group"]) == {"field", "published"}


def test_the_parts_of_the_page_count_rows_and_estimators():
    lines = [Line(**{**vars(TEMPLATE), "part": part, "rows": 7, "mean_error": 0.5}) for part in (OVERALL, *TITLES)]
    counts = {"tested": 755, "unseen": 69, "train": 5913, "validation": 727, "one_in": 4, "tracked": 180, "failed": ""}
    made = parts([*lines, *fold_lines()], {**counts, "transformers": "4.2"})
    assert COLUMNS.keys() <= {OVERALL, *TITLES}
    assert f"| fixed |{' **50%** |' * len(COLUMNS)}" in made["mean error"]
    assert "(published)" not in made["mean error"]
    assert "The 755 test rows" in made["rows"] and "traced with transformers 4.2." in made["rows"]


def test_rows_need_the_release_of_transformers_that_they_were_measured_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.field.rows.version", lambda name: "5.1.0")
    monkeypatch.setattr("sys.argv", ["field", "--data", str(tmp_path), "--docs", str(tmp_path / "docs")])
    assert field_command.main() == 2
    assert (
        "expected transformers 4.51.3, which xMem's runs used, found 5.1.0: run `make bench`" in capsys.readouterr().err
    )
    assert not (tmp_path / "docs").exists()


def test_estimators_are_sorted_and_predict_only_the_rows_that_they_support():
    spec = mlp_spec()
    field = Field(
        [], [], [EvaluatedRow(EXAMPLES[0], spec, ("mlp",)), EvaluatedRow(EXAMPLES[1], spec, (UNSEEN, UNSEEN_2024))]
    )
    named = Entry("Horus", "field", "computed", Horus())
    other = Entry("X (published)", "published", "published", Horus(), supported=frozenset({spec.id}), only=UNSEEN_2024)
    assert [item.title for item in in_order([other, named])] == ["Horus", "X (published)"]
    assert supported_by(named, field).tolist() == [True, True]
    assert supported_by(other, field).tolist() == [False, True]
    assert field.counts()[UNSEEN] == 1


def test_a_smaller_sample_is_part_of_a_larger_one():
    specs = [mlp_spec(width=64 + index) for index in range(200)]
    some, more = ([spec for spec in specs if in_sample(spec, one_in)] for one_in in (8, 4))
    assert set(some) < set(more)
    assert 30 < len(more) < 70


def test_mem_tracker_counts_weights_gradients_and_states():
    spec = mlp_spec(width=512, depth=4, batch=16)
    parameter_mib = 4 * (4 * 512 * 513 + 513 * 10) / MIB
    peak_mib, seconds = tracked_mib(spec)
    assert 4 * parameter_mib < peak_mib < 7 * parameter_mib
    assert seconds > 0


def test_tracked_figures_are_cached_and_truncated_lines_skipped(tmp_path):
    spec = mlp_spec()
    journal = tmp_path / f"mem_tracker-{sys.modules['torch'].__version__}.jsonl"
    journal.write_text(json.dumps({"id": spec.id, "mib": 7.0, "seconds": 1.0}) + "\n" + '{"id": "cut", "mi')
    assert tracked_figures([spec], tmp_path, workers=1) == [{"id": spec.id, "mib": 7.0, "seconds": 1.0}]


def test_the_seconds_of_an_estimate_include_its_inputs():
    spec = mlp_spec()
    row = EvaluatedRow(example_of_spec(spec, profile=load_profile("a100_40gb")), spec, ("mlp",))
    entries = [Entry(name, "field", "computed", Horus(), (name,)) for name in (TABLE, TRACE, FAKE, TRACKED)]
    seconds = seconds_of(entries, [row])
    assert 0 < seconds[TABLE] < seconds[TRACE]
    assert seconds[TRACKED] > seconds[FAKE] > 0


def points():
    rows = [
        {"name": name, "batch": 32, "family": family, "shown": shown, "measured_mib": mib, "fits": True,
         "capacity_mib": CARD_BYTES / MIB, "estimator": estimator, "group": "ours", "estimate_mib": estimate}
        for name, family, shown, mib in (
            ("vgg16", UNSEEN, f"{UNSEEN} + {UNSEEN_2024}", 8222.0), ("", "mlp", "mlp", 1500.0),
        )
        for estimator, estimate in (("universal", mib * 1.1), ("Horus", inf), ("Horus (published)", 82_000.0))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_does_not_fit_counts_as_an_error_of_one_and_is_drawn_at_the_capacity():
    errors = errors_table(points())
    assert errors.groupby("estimator")["error"].max().to_dict() == pytest.approx({"Horus": 1, "universal": 0.1})
    scatter = scatter_table(points()).query("estimator == 'Horus'")
    assert scatter["refused"].all()
    assert set(scatter["estimate_gb"]) == {40_000 / 1024}


def test_bars_show_the_unseen_networks():
    bars = unseen_table_of(points())
    assert list(bars.index) == ["vgg16\n32"]
    assert bars.loc["vgg16\n32", "measured"] == pytest.approx(8222 / 1024)
    assert bars.loc["vgg16\n32", "Horus (published)"] == pytest.approx(82_000 / 1024)
    assert np.isnan(bars.loc["vgg16\n32", "GPUMemNet (published)"])


def test_pictures_are_small(tmp_path):
    draw_all(points(), tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sorted(sizes) == ["field_errors.png", "field_scatter.png", "field_unseen.png"]
    assert max(sizes.values()) < 150_000


def test_one_command_writes_page_csv_and_points(tmp_path, monkeypatch):
    specs = [mlp_spec(width=64 + 8 * index) for index in range(6)]
    membership = [("mlp",)] * 4 + [(UNSEEN, UNSEEN_2024)] * 2
    profile = load_profile("a100_40gb")
    tested = [
        EvaluatedRow(example_of_spec(spec, profile=profile), spec, part)
        for spec, part in zip(specs, membership, strict=True)
    ]
    examples = [item.example for item in tested]
    monkeypatch.setattr(field_command, "load_field", lambda *_: Field(examples[:2], examples[2:3], tested))
    figures = [{"id": specs[0].id, "mib": 90.0, "seconds": 1.0}, {"id": specs[1].id, "error": "odd"}]
    monkeypatch.setattr(field_command, "tracked_figures", lambda *_: figures)

    def ready(data, mib):
        return [Entry("PyTorch's MemTracker", "field", "computed", Tracked(mib), (), supported=frozenset(mib))]

    monkeypatch.setattr(field_command, "ready", ready)
    monkeypatch.setattr(field_command, "unfitted", lambda: [Entry("majority", "field", "learned", Majority(), ())])
    monkeypatch.setattr(field_command, "draw_all", lambda points, directory: None)
    words = ["--data", str(tmp_path), "--docs", str(tmp_path / "docs"), "--results", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", ["field", *words])
    (tmp_path / "docs").mkdir()
    marks = [
        f"<!-- made by benchmarks.{MAKER}: {end}{name} -->"
        for name in ("rows", "mean error")
        for end in ("", "end of ")
    ]
    (tmp_path / "docs" / "accuracy.md").write_text("\n".join(marks))
    assert field_command.main() == 0
    rows = pd.read_csv(tmp_path / "docs" / "accuracy.csv").set_index(["estimator", "part"])["rows"]
    assert (rows["majority", OVERALL], rows["majority", UNSEEN], rows["majority", "mlp"]) == (6, 2, 4)
    assert rows["PyTorch's MemTracker", OVERALL] == 1
    page = (tmp_path / "docs" / "accuracy.md").read_text()
    assert "The 4 test rows" in page
    assert "1 rows; it failed on 1 networks" in page
    points = pd.read_csv(tmp_path / "results" / "points.csv")
    assert points["estimator"].value_counts().to_dict() == {"majority": 6, "PyTorch's MemTracker": 1}


def test_without_measurements_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["field", "--data", str(tmp_path / "none"), "--docs", str(tmp_path)])
    assert field_command.main() == 0
    assert "VRAMCAST_DATA" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
