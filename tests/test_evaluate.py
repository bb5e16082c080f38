"""Estimates against measured rows: the figures, and the command."""

import json

import pytest
from measured_tables import small_table

from vramcast.models.evaluate_command import main
from vramcast.models.simulation_store import SimulationStore


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setenv("VRAMCAST_CACHE", str(tmp_path / "cache"))
    return small_table(tmp_path)


def test_what_was_simulated_is_not_simulated_again(table, monkeypatch, capsys):
    words = ["--data", str(table), "--json"]
    assert main(words) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(SimulationStore, "_results", lambda *_: pytest.fail("simulated again"))
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
    wanted = {
        "mean_relative_error",
        "p95_relative_error",
        "point_too_low",
        "oom_recall",
        "oom_false_alarms",
        "intervals",
    }
    assert wanted <= figures.keys()


def test_another_device_and_the_worst_rows(table, capsys):
    assert main(["--data", str(table), "--device", "t4", "--worst", "2"]) == 0
    text = capsys.readouterr().out
    assert "profile t4" in text
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
    assert main(["--data", str(public_table(file)), "--bucket-mib", str(bucket_mib), "--rows", "20", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["median_relative_error"] <= median
    assert figures["accuracy"] >= accuracy
    assert figures["oom_recall"] in (None, 1.0)
