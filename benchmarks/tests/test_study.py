"""The tables of the study."""

import json
import re
from argparse import Namespace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_examples import CARD_BYTES, MIB, example_of, measured_mlps, mlp_table

from benchmarks.page import publish, study_parser, write_part
from benchmarks.performance import __main__ as performance
from benchmarks.study import ablation, projections, regression, sampling_curves, staircase
from benchmarks.study.result_cache import ResultCache
from benchmarks.study.rows import drawn_specs, folds_of
from benchmarks.study.style import markdown
from benchmarks.virtual_gpu import MEASURED, measured_lines
from vramcast.dataset_builder.configuration import compose_build, make_build, settings_of


def test_cached_figures_are_not_computed_again(tmp_path):
    path, calls = tmp_path / "runs" / "cache.jsonl", []
    for _ in range(2):
        cache = ResultCache(path)
        assert cache.get({"fold": 0}, lambda: calls.append(0) or {"accuracy": 0.5}) == {"accuracy": 0.5}
        assert cache.get({"fold": 1}, lambda: calls.append(1) or [1, 2]) == [1, 2]
    assert calls == [0, 1]


def test_a_truncated_line_is_ignored(tmp_path):
    path = tmp_path / "cache.jsonl"
    ResultCache(path).get({"fold": 0}, lambda: 1)
    line = path.read_text()
    path.write_text(line + line[: len(line) // 2])
    assert ResultCache(path).get({"fold": 0}, lambda: 2) == 1
    assert json.loads(line)["settings"] == {"fold": 0}


def test_a_figure_after_a_truncated_line_is_stored(tmp_path):
    path = tmp_path / "cache.jsonl"
    path.write_text('{"key": "torn')
    ResultCache(path).get({"fold": 0}, lambda: 1)
    assert ResultCache(path).get({"fold": 0}, lambda: 2) == 1


def test_a_part_of_a_page_is_written_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- made by benchmarks.x: t -->\nold\n<!-- made by benchmarks.x: end of t -->\nb\n")
    write_part(page, "x", "t", "new")
    assert page.read_text() == "a\n<!-- made by benchmarks.x: t -->\nnew\n<!-- made by benchmarks.x: end of t -->\nb\n"
    with pytest.raises(SystemExit, match="add them"):
        write_part(page, "x", "other", "new")
    without = tmp_path / "without.md"
    without.write_text("no marks")
    write_part([without, page], "x", "t", "newer")
    assert ("newer" in page.read_text(), without.read_text()) == (True, "no marks")


def test_output_of_a_measurement_is_written_into_the_pages_that_have_its_marks(tmp_path):
    page = tmp_path / "page.md"
    marks = "<!-- made by benchmarks.performance: {0} --><!-- made by benchmarks.performance: end of {0} -->"
    page.write_text(marks.format("speed") + marks.format("table"))
    printed = {"speed": "1 ms\n", "table": "| a |\n| --- |\n", "unmarked": "nothing"}
    performance.publish(list(printed), [page], printed.__getitem__)
    assert "speed -->\n```\n1 ms\n```\n<!--" in page.read_text()
    assert "table -->\n| a |\n| --- |\n<!--" in page.read_text()


def test_every_mark_of_a_measurement_has_its_measurement():
    marks = [
        re.findall(r"made by benchmarks\.performance: (?:end of )?(\w+) -->", page.read_text())
        for page in performance.PAGES
    ]
    assert all(marks)
    assert set(chain(*marks)) <= set(performance.MEASUREMENTS)


def test_the_virtual_gpu_has_a_line_for_each_table_and_stack():
    part = {"rows": 1200, "median_relative_error": 0.0012, "mean_relative_error": 0.02, "p95_relative_error": 0.1}
    part |= {"point_too_low": 0.5, "accuracy": 1.0, "oom_recall": None, "oom_false_alarms": 0.0}
    stacks = {key: part for table in MEASURED for _, _, key in table.lines}
    head, rule, *lines = measured_lines(lambda file, options: {**part, "bucket_mib": 1024, "by_stack": stacks})
    assert head.count("|") == rule.count("|") == lines[0].count("|")
    assert lines[0] == "| MLP, step 1 | 1,200 | 0.12 % | 2.0 % | 10.0 % | 50.0 % | 100.0 % at 1024 MiB | - | 0.0 % |"
    assert len(lines) == sum(len(table.lines) for table in MEASURED) == 10


def test_publish_writes_table_and_picture_where_the_options_say(tmp_path, capsys):
    parser = study_parser(None, measured=False)
    page, drawn = tmp_path / "page.md", []
    page.write_text("<!-- made by benchmarks.x: table --><!-- made by benchmarks.x: end of table -->")
    publish(parser.parse_args([]), "x", "new", drawn.append)
    assert (capsys.readouterr().out, drawn, "new" in page.read_text()) == ("new\n", [], False)
    publish(parser.parse_args(["--page", str(page), "--picture", "x.png"]), "x", "new", drawn.append)
    assert (drawn, "new" in page.read_text()) == ([Path("x.png")], True)


def test_markdown_has_a_rule_below_its_header():
    assert markdown(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_drawn_specs_are_the_distinct_specs_of_a_build():
    words = ["family=mlp", "sampler=uniform", "seed=3"]
    specs = drawn_specs(words, 20)
    assert len({spec.id for spec in specs}) == 20
    build = make_build(settings_of(compose_build([*words, "n=20"]), words), None)
    first = [build.space.spec(values).id for values in islice(build.sampler.candidates(build.space, 3), 200)]
    assert [spec.id for spec in specs] == [key for key in dict.fromkeys(first) if key in {s.id for s in specs}][:20]


def test_an_array_is_finite():
    assert len(drawn_specs(["family=mlp", "space=gpumemnet_mlp_step1", "sampler=orthogonal", "seed=0"], 500)) <= 25


def test_folds_test_every_row_once_and_never_train_on_it():
    rows = measured_mlps(30)
    folds = list(folds_of(rows, 3))
    assert sorted(row.id for _, test in folds for row in test) == sorted(row.id for row in rows)
    assert all(not {row.group for row in train} & {row.group for row in test} for train, test in folds)


def test_steps_are_treads_between_changes():
    assert staircase.steps([1, 1, 3, 3, 3, 23, 21, 21]) == ([3, 1], [2, 20, -2])
    assert staircase.steps([5, 5, 5]) == ([], [])


def test_a_line_of_the_staircase_counts_steps_up_and_down():
    sweep = pd.DataFrame(
        {"width": range(10, 18), "requested_mib": np.arange(8) * 0.5, "reserved_mib": [1, 1, 3, 3, 3, 23, 21, 21]}
    )
    assert staircase.steps_line("x", sweep) == ["x", "10-17", "0.50 MiB", "3", "2", "3", "20 MiB", "1"]


def test_a_sentence_describes_the_grid_of_measured_figures():
    measured = pd.DataFrame({"used_mib": [101, 103, 103, 104], "simulated_mib": [101, 103, 113, 204]})
    sentence = staircase.grid_sentence(measured, 101)
    assert "75.0% of 4 measured figures are 101 MiB and a multiple of 2 MiB; they take 3 values" in sentence
    assert "gives 50.0% of them exactly, and 75.0% within 20 MiB" in sentence


def test_neighbours_agree_if_classes_are_separated():
    random = np.random.default_rng(0)
    classes = np.repeat([0, 1], 40)
    points = random.normal(size=(80, 2))
    apart = points + 100 * classes[:, None]
    assert projections.neighbours_agree(apart, classes) == 1.0
    assert projections.neighbours_agree(points, classes) < 0.8
    assert projections.largest_share(np.array([0, 0, 0, 4])) == 0.75


def test_no_virtual_row_of_a_tested_network_is_used_for_training():
    rows = measured_mlps(9)
    train, virtual, test = rows[:3], rows[3:], rows[6:]
    virtual_alone = ablation.rows_for(ablation.Variant("layers", "virtual"), train, virtual, test)
    assert [row.id for row in virtual_alone] == [row.id for row in rows[3:6]]
    both = ablation.rows_for(ablation.Variant("layers", "both"), train, virtual, test)
    assert [row.id for row in both] == [row.id for row in rows[:6]]
    assert ablation.rows_for(ablation.Variant("virtual GPU", "none"), train, virtual, test) == []


def ablation_lines():
    figures = {"too_low": 0.01, "median_relative_error": 0.02}
    return [
        {"family": family, "features": features, "rows": rows, "fold": fold, "accuracy": accuracy, **figures}
        for family in ("mlp", "cnn")
        for features, rows in (("gpumemnet", "measured"), ("virtual GPU", "none"))
        for fold, accuracy in enumerate((0.8, 0.9))
    ]


def test_the_ablation_table_has_means_and_deviations_in_the_order_of_the_variants(tmp_path):
    table = ablation.ablation_table(ablation_lines())
    assert list(table["features"]) == ["gpumemnet", "virtual GPU"] * 2
    assert table["accuracy"].tolist() == pytest.approx([0.85] * 4)
    assert table["scatter"].tolist() == pytest.approx([0.1 / np.sqrt(2)] * 4)
    text = ablation.to_markdown(table).splitlines()
    assert text[0] == "| features | learned from | mlp | too low | cnn | too low |"
    assert text[2] == "| gpumemnet | measured | 0.850 ± 0.071 | 1.0% | 0.850 ± 0.071 | 1.0% |"
    assert text[-1].startswith("| *published* |")
    ablation.draw(table, tmp_path / "ablation.png")
    assert (tmp_path / "ablation.png").stat().st_size < 120_000


def test_the_ablation_yields_a_line_per_variant_and_fold(tmp_path, monkeypatch):
    rows = measured_mlps(30)
    monkeypatch.setattr(ablation, "measured_examples", lambda *_: rows)
    monkeypatch.setattr(ablation, "drawn_specs", lambda *_: [])
    monkeypatch.setattr(ablation, "simulated_examples", lambda *_: {row.id: row for row in measured_mlps(9, 90)})
    monkeypatch.setattr(ablation, "VARIANTS", (ablation.VARIANTS[-1],))
    arguments = Namespace(data="", rows=None, folds=3, members=1)
    lines = list(ablation.study("mlp", arguments, ResultCache(tmp_path / "cache.jsonl")))
    assert [(line["fold"], line["features"], line["rows"]) for line in lines] == [
        (fold, "virtual GPU", "none") for fold in range(3)
    ]


def test_the_virtual_gpu_is_evaluated_without_training():
    figures = ablation.evaluate_fold(ablation.Variant("virtual GPU", "none"), [], measured_mlps(20), 1000, 1)
    assert figures["accuracy"] == 1.0  # the label of these examples is the simulation


def test_point_estimates_are_compared_in_mib_and_by_bucket():
    rows = [
        example_of(mlp_table(8, 8), used_bytes=1000 * MIB, name="a"),
        example_of(mlp_table(8, 8), used_bytes=4000 * MIB, name="b"),
        example_of(mlp_table(8, 8), used_bytes=CARD_BYTES, fits=False, name="c"),
    ]
    figures = regression.figures_of(np.array([1100.0 * MIB, 4000.0 * MIB, np.inf]), rows, 2000)
    assert figures["mean_error_mib"] == pytest.approx(50)
    assert figures["accuracy"] == 1.0
    assert figures["p95_relative_error"] == pytest.approx(0.1)


def test_raw_numbers_are_the_four_of_the_talk():
    row = example_of(mlp_table(8, 16, 4), used_bytes=MIB, batch_size=32)
    assert regression.raw_numbers([row]).tolist() == [[3, 32, 8 * 16 + 16 + 16 * 4 + 4, 16 + 16 + 4]]


def test_all_regressors_but_the_raw_network_learn_growth_with_width():
    train, test = ([row for row in rows if row.measured.fits] for rows in (measured_mlps(120), measured_mlps(20, 300)))
    errors = {
        name: regression.figures_of(regressor(train, test), test, 1000)["mean_error_mib"]
        for name, regressor in regression.REGRESSORS.items()
    }
    raw, _ = errors.pop("neural network, four raw numbers"), errors.pop("shapes alone, nothing learned")
    assert raw > 200
    assert max(errors.values()) < raw / 5
    assert errors[regression.WITH_VIRTUAL[-1]] == 0  # the label of these examples is the simulation
    assert errors["polynomial of the gap to the virtual estimate"] < errors["polynomial (GV)"]


def test_the_regression_table_has_one_line_per_regressor():
    figures = dict.fromkeys(regression.FIGURES, 0.25) | {"mean_error_mib": 1234.4}
    lines = [{"family": family, "regressor": "r", "fold": 0, **figures} for family in ("mlp", "real networks")]
    text = regression.to_markdown(regression.regression_table(lines)).splitlines()
    assert text[0] == "| regressor | mlp | real networks |"
    assert text[2] == "| r | 1,234 MiB, 25.0%, 0.250 | 1,234 MiB, 25.0%, 0.250 |"


def test_curves_are_evaluated_on_unseen_rows_and_count_training_rows(monkeypatch):
    rows = measured_mlps(60)
    monkeypatch.setattr(sampling_curves, "ESTIMATORS", {"gap polynomial": sampling_curves.gap_polynomial})
    seen = rows[:40]
    (line,) = sampling_curves.curve_lines(sampling_curves.SETTINGS["mlp"], seen, {"simulated": rows})
    (again,) = sampling_curves.curve_lines(sampling_curves.SETTINGS["mlp"], seen, {"simulated": rows[40:]})
    assert line == again
    assert (line["rows"], line["completed"]) == (40, 36)


def curve_figures():
    return [
        {"field": "mlp", "sampler": sampler, "seed": seed, "size": size, "estimator": "gap polynomial",
         "test": "simulated", "rows": size, "completed": size, "accuracy": 0.9, "mean_error": 0.1 * seed,
         "median_error": 0.01}
        for sampler, sizes in (("uniform", (50, 100)), ("orthogonal", (50,)))
        for size in sizes
        for seed in (1, 2)
    ]  # fmt: skip


def test_curves_are_means_over_seeds_and_finite_arrays_have_fewer_points(tmp_path):
    table = sampling_curves.curves_table(curve_figures())
    assert table["mean_error"].tolist() == pytest.approx([0.15] * 3)
    assert table["seeds"].tolist() == [2, 2, 2]
    text = sampling_curves.to_markdown(table, "simulated", "mean_error").splitlines()
    assert text[0] == "| space, estimator | sampler | 50 rows | 100 rows |"
    assert text[3] == "| mlp, gap polynomial | orthogonal | 15.0% ± 7.1% |  |"
    sampling_curves.draw(table, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size < 120_000
