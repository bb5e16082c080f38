"""Estimates against measured rows: the figures, and the command."""

import json

import pytest
from measured_tables import small_table

from vramcast.models.evaluate_command import main
from vramcast.models.metrics import Judged, judge
from vramcast.models.simulation import SimulationCache


def row(actual, estimate, oom=False):
    return Judged("row", actual, oom, estimate)


def test_the_figures_by_hand():
    rows = [
        row(1000, 1000),
        row(1000, 970),
        row(2000, 2200),
        row(900, None),
        row(3000, None, oom=True),
        row(3000, 2900, oom=True),
    ]
    found = judge(rows, bucket_mib=1000, excluded=3)
    assert found.rows == 6
    assert found.excluded == 3
    assert found.median_relative_error == pytest.approx((0.03 + 0.1) / 2)
    assert found.mean_relative_error == pytest.approx((0 + 0.03 + 0.1 + 1) / 4)
    assert found.p95_relative_error == 1.0
    assert found.too_low == 0.25
    assert found.oom_recall == 0.5
    assert found.oom_false_alarms == 0.25
    # right: 1000 -> 1000, 2000 -> 2200, and the out-of-memory row that was called; 970 is a bucket too low
    assert found.accuracy == pytest.approx(3 / 6)


def test_no_rows_have_no_figures():
    found = judge([], bucket_mib=1000)
    assert found.rows == 0
    assert found.median_relative_error is None
    assert found.accuracy is None


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # simulations are kept below it
    return small_table(tmp_path)


def test_what_was_simulated_is_not_simulated_again(table, monkeypatch, capsys):
    words = ["--data", str(table), "--cache", "kept", "--json"]
    assert main(words) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(SimulationCache, "_outcomes", lambda *_: pytest.fail("simulated again"))
    assert main(words) == 0
    assert capsys.readouterr().out == first


def test_the_command_prints_every_figure(table, capsys):
    assert main(["--data", str(table), "--bucket-mib", "1000", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows"] == 3
    assert figures["excluded"] == 1
    assert figures["profile"] == "a100_40gb_gpumemnet_2024"
    assert figures["accuracy"] == 1.0
    assert figures["median_relative_error"] < 0.01
    wanted = {"mean_relative_error", "p95_relative_error", "too_low", "oom_recall", "oom_false_alarms"}
    assert wanted <= figures.keys()


def test_another_device_and_the_worst_rows(table, capsys):
    assert main(["--data", str(table), "--device", "t4", "--worst", "2"]) == 0
    text = capsys.readouterr().out
    assert "profile                  t4" in text
    assert text.count("measured     1451") == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "none.csv"], "expected a CSV table"),
        (["--data", "TABLE", "--device", "abacus"], "expected device to be one of"),
        (["--data", "TABLE", "--bucket-mib", "0"], "expected --bucket-mib"),
        (["--data", "TABLE", "--rows", "0"], "expected --rows to be a whole number from 1"),
    ],
)
def test_bad_input_gets_a_sentence(table, words, sentence, capsys):
    assert main([*(str(table) if word == "TABLE" else word for word in words)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "bucket_mib", "median", "accuracy"),
    [
        ("gpumemnet/mlp_data_step1.csv", 1000, 0.004, 0.99),
        ("gpumemnet/mlp_data_step2.csv", 1000, 0.004, 0.99),
        ("gpumemnet/transformer_data_sample.csv", 8000, 0.012, 0.9),
        ("gpumemnet/cnn_data_step1.csv", 8000, 0.045, 0.85),
    ],
)
def test_the_virtual_gpu_on_the_first_public_rows(public_table, file, bucket_mib, median, accuracy, capsys):
    """A guard against falling back; the figures of the whole tables are in docs/virtual-gpu.md."""
    assert main(["--data", str(public_table(file)), "--bucket-mib", str(bucket_mib), "--rows", "40", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["median_relative_error"] <= median
    assert figures["accuracy"] >= accuracy
    assert figures["oom_recall"] in (None, 1.0)
