"""Checkpoints: directories that explain themselves, are small, and are read without what trained them."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from synthetic_examples import mlp_examples

from vramcast.errors import UserError
from vramcast.models.checkpoint import Card, load_checkpoint, load_metrics, save_checkpoint
from vramcast.models.estimators.classifiers import NetworkClassifier, NetworkSettings
from vramcast.models.estimators.ensemble import Ensemble
from vramcast.models.estimators.fitting import PlainFitter
from vramcast.models.storage import State, read_state, write_state

CARD = Card(
    title="Test estimator",
    summary="Says what made-up jobs take.",
    data="120 made-up rows.",
    licence="CC0",
    citation="nobody",
    command="pytest",
)
METRICS = {"accuracy": 0.98765, "rows": 120}
QUICK = PlainFitter(epochs=2)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with an ensemble of the size that is shipped."""
    directory = tmp_path_factory.mktemp("checkpoint")
    fitted = Ensemble.of(NetworkSettings(), 2, QUICK).fit(mlp_examples(300), mlp_examples(40, seed=1))
    save_checkpoint(fitted, directory, METRICS, CARD)
    return directory


def test_a_checkpoint_is_read_by_its_kind(written, tmp_path):
    assert isinstance(load_checkpoint(written), Ensemble)
    single = NetworkClassifier(NetworkSettings(width=8), QUICK).fit(mlp_examples(20), mlp_examples(8, seed=1))
    save_checkpoint(single, tmp_path, METRICS, CARD)
    assert isinstance(load_checkpoint(tmp_path), NetworkClassifier)
    with pytest.raises(UserError, match="expected an estimator of the kind ensemble"):
        Ensemble.load(tmp_path)


def test_it_has_four_files_and_is_small(written):
    names = {"README.md", "estimator.json", "metrics.json", "weights.safetensors"}
    assert {path.name for path in written.iterdir()} == names
    assert sum(path.stat().st_size for path in written.iterdir()) < 700_000


def test_the_card_says_what_a_person_must_know(written):
    text = (written / "README.md").read_text()
    for words in ("Test estimator", "120 made-up rows", "CC0", "nobody", "`pytest`", "| accuracy | 0.9877 |"):
        assert words in text
    assert load_metrics(written) == METRICS


def test_a_card_may_be_edited_and_figures_may_not(written):
    card, metrics = written / "README.md", written / "metrics.json"
    before = card.read_text(), metrics.read_text()
    card.write_text("shorter")
    load_checkpoint(written)
    metrics.write_text(json.dumps({**METRICS, "accuracy": 1.0}))
    with pytest.raises(UserError, match=r"found that metrics.json is not the file that was written"):
        load_checkpoint(written)
    card.write_text(before[0])
    metrics.write_text(before[1])


def test_a_missing_file_is_told_with_what_is_there(written, tmp_path):
    (tmp_path / "estimator.json").write_bytes((written / "estimator.json").read_bytes())
    with pytest.raises(UserError, match=r"expected .* weights.safetensors .* found \['estimator.json'\]"):
        load_checkpoint(tmp_path)


def test_an_unknown_kind_is_refused(tmp_path):
    write_state(tmp_path, "oracle", State({}, {"answer": np.array([42.0])}))
    with pytest.raises(UserError, match="expected an estimator of a kind among"):
        load_checkpoint(tmp_path)


def test_a_pickle_in_the_place_of_weights_is_not_opened(tmp_path):
    write_state(tmp_path, "network", State({}, {"answer": np.array([42.0])}))
    (tmp_path / "weights.safetensors").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(UserError, match="not the file that was written"):
        load_checkpoint(tmp_path)


def test_weights_of_another_network_are_refused(tmp_path):
    fitted = NetworkClassifier(NetworkSettings(width=8), QUICK).fit(mlp_examples(20), mlp_examples(8, seed=1))
    state = fitted.state()
    first = next(iter(state.arrays))
    write_state(tmp_path, "network", State(state.settings, {**state.arrays, first: state.arrays[first][:, :3]}))
    with pytest.raises(UserError, match="expected the weights of the network in the settings"):
        load_checkpoint(tmp_path)


def test_states_come_back(tmp_path):
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([-np.inf, 1.5])}
    write_state(tmp_path, "thing", State({"depth": 3, "share": 0.1}, arrays))
    found = read_state(tmp_path, "thing")
    assert found.settings == {"depth": 3, "share": 0.1}
    for name, value in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], value)


def test_reading_needs_neither_lightning_nor_hydra_and_unpickles_nothing(written):
    """torch itself imports pickle; so reading is held to never calling it."""
    script = textwrap.dedent(
        """
        import pickle, sys
        from pathlib import Path
        import torch

        def refuse(*args, **kwargs):
            raise AssertionError("something was unpickled")

        pickle.load = pickle.loads = pickle.Unpickler = torch.load = refuse
        from vramcast.models.checkpoint import load_checkpoint
        estimator = load_checkpoint(Path(sys.argv[1]))
        assert len(estimator.members) == 2
        heavy = {name.partition(".")[0] for name in sys.modules} & {
            "lightning", "pytorch_lightning", "hydra", "omegaconf", "sklearn", "pandas", "optuna", "timm",
        }
        print(sorted(heavy))
        """
    )
    root = Path(__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", script, str(written)], cwd=root, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"
