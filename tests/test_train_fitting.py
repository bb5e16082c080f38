"""The Lightning fitter: the same seed gives the same weights, also for a resumed run."""

import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from made_examples import measured_mlps

from vramcast.errors import UserError
from vramcast.models.estimators.classifiers import NetworkClassifier, NetworkSettings, make_batch, prepare
from vramcast.train.fitting import LightningFitter, MiniBatches
from vramcast.train.loggers import make_loggers
from vramcast.train.settings import TrainerSettings

TRAIN, VALIDATION = measured_mlps(40), measured_mlps(12, start=40)
SETTINGS = NetworkSettings(width=8, blocks=1, dropout=0.2, features="gpumemnet", seed=3)
TRAINER = {
    "epochs": 6, "patience": 6, "batch_size": 16, "learning_rate": 0.01, "weight_decay": 0.01, "gradient_clip": 1.0,
    "threads": 1,
}  # fmt: skip


class StopAt(Callback):
    """Raises KeyboardInterrupt in the middle of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == self.epoch and batch_idx == 1:
            raise KeyboardInterrupt


def _fitter(directory: Path, callbacks=(), loggers=None, **changes) -> LightningFitter:
    settings = TrainerSettings(**{**TRAINER, **changes})
    return LightningFitter(settings, directory, loggers or (lambda _: []), callbacks, bar=False)


def _weights(fitter: LightningFitter, settings: NetworkSettings = SETTINGS) -> dict[str, torch.Tensor]:
    classifier = NetworkClassifier(settings, fitter).fit(TRAIN, VALIDATION)
    return {name: value.clone() for name, value in classifier.network_.state_dict().items()}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_training_lowers_the_loss_and_keeps_the_best_epoch(tmp_path):
    fitter = _fitter(tmp_path)
    classifier = NetworkClassifier(SETTINGS, fitter).fit(TRAIN, VALIDATION)
    losses = [epoch["validation_loss"] for epoch in fitter.history["member0"]]
    assert len(losses) == 6
    assert min(losses) < losses[0]
    with torch.inference_mode():
        assert float(classifier.loss(make_batch(SETTINGS, classifier.encoder_, VALIDATION))) == pytest.approx(
            min(losses), rel=1e-5
        )


def test_the_same_seed_gives_the_same_weights(tmp_path):
    first, second = (_fitter(tmp_path / name) for name in ("first", "second"))
    assert _equal(_weights(first), _weights(second))
    assert first.history == second.history
    other = NetworkSettings(**{**vars(SETTINGS), "seed": 4})
    assert not _equal(_weights(_fitter(tmp_path / "third")), _weights(_fitter(tmp_path / "fourth"), other))


@pytest.mark.parametrize(("epoch", "rate"), [(0, 0.01), (3, 0.01), (3, 0.5)], ids=["first", "better", "worse"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, epoch, rate):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _weights(_fitter(tmp_path / "stopped", [StopAt(epoch)], learning_rate=rate))
    assert signal.getsignal(signal.SIGINT) is handler
    if epoch:  # training resumes from the last epoch, not from the best
        assert torch.load(tmp_path / "stopped" / "member0" / "last.ckpt", weights_only=True)["epoch"] == epoch - 1
    resumed, whole = (_fitter(tmp_path / name, learning_rate=rate) for name in ("stopped", "whole"))
    assert _equal(_weights(resumed), _weights(whole))
    assert resumed.history == whole.history


def test_a_truncated_checkpoint_restarts_its_member_alone(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        _weights(_fitter(tmp_path / "stopped", [StopAt(3)]))
    last = tmp_path / "stopped" / "member0" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    assert _equal(_weights(_fitter(tmp_path / "stopped")), _weights(_fitter(tmp_path / "whole")))
    assert "training its member from the start" in capsys.readouterr().err


def test_a_complete_member_is_not_trained_again(tmp_path):
    weights = _weights(_fitter(tmp_path))
    again = _fitter(tmp_path, [StopAt(0)])
    assert _equal(_weights(again), weights)
    assert len(again.history["member0"]) == 6


def test_every_member_has_its_own_directory(tmp_path):
    fitter = _fitter(tmp_path)
    _weights(fitter)
    _weights(fitter)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["member0", "member1"]
    assert list(fitter.history) == ["member0", "member1"]


def test_training_stops_when_validation_does_not_improve(tmp_path):
    fitter = _fitter(tmp_path, epochs=50, patience=1, learning_rate=1.0)
    _weights(fitter)
    assert len(fitter.history["member0"]) < 50


def test_mini_batches_contain_every_row_once_in_an_order_set_by_seed_and_epoch():
    order = MiniBatches(prepare(SETTINGS, TRAIN[:10], VALIDATION).train, 4, seed=1)
    first = torch.cat(list(order))
    assert len(list(order)) == len(order) == 3
    assert sorted(first.tolist()) == list(range(10))
    assert torch.equal(torch.cat(list(order)), first)
    order.set_epoch(1)
    assert not torch.equal(torch.cat(list(order)), first)


def test_losses_are_written_as_csv(tmp_path):
    _weights(_fitter(tmp_path, loggers=make_loggers({"csv": {}})))
    lines = (tmp_path / "member0" / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    assert {"epoch", "train_loss", "validation_loss"} <= set(lines[0].split(","))
    assert len(lines) > 6


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_logger_without_its_library_fails_before_training(monkeypatch, name):
    monkeypatch.setattr("vramcast.train.loggers.find_spec", lambda library: None)
    with pytest.raises(UserError, match=rf"pip install 'vramcast\[{name}\]'"):
        make_loggers({name: {}})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"wandb": {}}, "expected logger to be one of"),
        ({"csv": {"colour": 1}}, r"found \['colour'\]"),
        ({"csv": 7}, "expected the settings of logger=csv, found 7"),
    ],
)
def test_an_unknown_logger_is_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        make_loggers(settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [("epochs", 0), ("patience", 1.5), ("learning_rate", 0), ("learning_rate", float("nan")), ("weight_decay", -1),
     ("gradient_clip", "much"), ("threads", True)],
)  # fmt: skip
def test_settings_of_the_trainer_are_checked(key, value):
    with pytest.raises(UserError, match=f"expected trainer.{key} to be"):
        TrainerSettings(**{**TRAINER, key: value})
