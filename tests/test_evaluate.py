"""Estimates against measured rows: the figures, and the command."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from measured_tables import small_table

from vramcast.commands.evaluate_command import main
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.jobs.families import make_spec
from vramcast.models.evaluation import _worst
from vramcast.models.metrics import PredictedRows
from vramcast.virtual_gpu.training.setup import TrainingSetup


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


def test_a_row_that_ran_out_as_predicted_is_no_error(monkeypatch):
    fits = np.array([False, False, True])
    point = np.array([np.inf, 5.0, 8.0])
    classes = np.zeros(3, dtype=np.int64)
    rows = PredictedRows(
        np.array(["mlp"] * 3), np.array(["a"] * 3), np.array([10.0, 10.0, 10.0]), fits, classes, classes,
        point, ~np.isfinite(point), point,
    )  # fmt: skip
    monkeypatch.setattr("vramcast.models.evaluation.predicted_rows", lambda *_: rows)
    network = {"arch": "uniform", "input_features": 4, "output_features": 2, "depth": 1}
    specs = [make_spec("mlp", network, TrainingSetup(batch_size=size)) for size in (1, 2, 3)]
    examples = [SimpleNamespace(id=spec.id) for spec in specs]
    measured = [SimpleNamespace(spec=spec) for spec in specs]
    worst = _worst(None, examples, measured, None, 3)
    assert [item.relative_error for item in worst] == [-0.5, -0.2, 0.0]
