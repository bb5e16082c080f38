"""`vramcast evaluate --checkpoint`: a small estimator and the baselines on a small table."""

import json

import pytest
from made_examples import measured_mlps
from measured_tables import small_table

from vramcast.commands.evaluate_command import main
from vramcast.models.baselines.catalogue import FORMULAS
from vramcast.models.checkpoint import Card, save_checkpoint
from vramcast.models.estimators.classifiers import NetworkClassifier, NetworkSettings
from vramcast.models.estimators.ensemble import Ensemble
from vramcast.models.estimators.fitting import PlainFitter

FIGURES = {
    "rows", "accuracy", "macro_f1", "too_low", "safe_too_low", "over_reservation_mib", "median_relative_error",
    "mean_relative_error", "by_family",
}  # fmt: skip
CARD = Card(title="made", summary="made", data="made", licence="none", citation="none", command="none")
TRAIN, VALIDATION = measured_mlps(170), measured_mlps(30, 170)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    settings = NetworkSettings(width=8, blocks=1)
    ensemble = Ensemble.of(settings, 1, PlainFitter(epochs=2)).fit(TRAIN, VALIDATION)
    save_checkpoint(ensemble, directory, {}, CARD)
    return directory


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return small_table(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("simulations")


def run(checkpoint, table, cache, *words):
    return main(["--checkpoint", str(checkpoint), "--data", str(table), "--cache", str(cache), *words])


def test_the_command_prints_every_figure_of_the_checkpoint_and_of_every_baseline(checkpoint, table, cache, capsys):
    assert run(checkpoint, table, cache, "--bucket-mib", "1000", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= FIGURES | {"baselines"}
    assert (found["rows"], found["excluded"], found["bucket_mib"]) == (3, 1, 1000)
    assert found["safe_too_low"] is not None
    assert found["by_family"]["mlp"]["rows"] == 3
    assert found["baselines"].keys() == FORMULAS.keys()
    assert all(figures.keys() >= FIGURES for figures in found["baselines"].values())
    assert found["baselines"]["virtual"]["accuracy"] == 1.0
    assert found["baselines"]["weights"]["too_low"] == 1.0


def test_the_text_has_a_line_for_each(checkpoint, table, cache, capsys):
    assert run(checkpoint, table, cache) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == [str(checkpoint), "mlp", *FORMULAS]


def test_a_checkpoint_without_bounds_has_no_safe_figures(tmp_path, table, cache, capsys):
    classifier = NetworkClassifier(NetworkSettings(width=8, blocks=1), PlainFitter(epochs=1)).fit(TRAIN, VALIDATION)
    save_checkpoint(classifier, tmp_path, {}, CARD)
    assert run(tmp_path, table, cache, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["safe_too_low"] is None
    assert found["baselines"].keys() == FORMULAS.keys()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--checkpoint", "none"], "expected a checkpoint's directory or a released one of"),
        (["--checkpoint", "HERE", "--risk", "2"], "expected a risk between 0 and 1"),
        (["--checkpoint", "HERE", "--device", "abacus"], "expected device to be one of"),
    ],
)
def test_bad_input_gets_a_sentence(checkpoint, table, cache, words, sentence, capsys):
    words = [str(checkpoint) if word == "HERE" else word for word in words]
    assert main(["--data", str(table), "--cache", str(cache), *words]) == 2
    assert sentence in capsys.readouterr().err
