"""A fitter that trains classifiers with Lightning; an interrupted run resumes from its last epoch."""

import vramcast.train._torchvision  # noqa: F401

# isort: split
import json
import logging
import math
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vramcast.files.durable import replacing
from vramcast.models.estimators.batch import Batch
from vramcast.models.estimators.classifiers import NetworkClassifier
from vramcast.progress import bar
from vramcast.train.settings import TrainerSettings

_LAST, _BEST, _HISTORY = "last.ckpt", "best.ckpt", "history.json"
_FINAL_RATE_DIVISOR = 50
"""The learning rate falls to this fraction of its start."""


class LightningFitter:
    """A `fitter=` for network classifiers: each call trains one member in its own directory."""

    def __init__(
        self,
        settings: TrainerSettings,
        directory: Path,
        loggers: Callable[[Path], list[Logger]],
        callbacks: Sequence[Callback] = (),
        bar: bool = True,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.loggers = loggers
        self.callbacks = list(callbacks)
        self.bar = bar
        self.history: dict[str, list[dict[str, float]]] = {}
        """Losses by member and epoch."""

    def __call__(self, classifier: NetworkClassifier, train: Batch, validation: Batch) -> None:
        """Train with early stopping, then load the weights of the best epoch."""
        member = f"member{len(self.history)}"
        directory = self.directory / member
        if not (directory / _HISTORY).exists():
            self._train(classifier, train, validation, directory, member)
        self.history[member] = json.loads((directory / _HISTORY).read_text())
        best = torch.load(directory / _BEST, weights_only=True)["state_dict"]
        prefix = "network."
        classifier.network_.load_state_dict({name.removeprefix(prefix): value for name, value in best.items()})

    def _train(
        self, classifier: NetworkClassifier, train: Batch, validation: Batch, directory: Path, member: str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(self.settings.threads)
        seed, size = torch.initial_seed(), self.settings.batch_size
        history = LossHistory(self.settings.epochs, member, self.bar)
        order = MiniBatches(train, size, seed)
        done = _epochs_done(directory / _LAST)
        order.set_epoch(done)  # Lightning sets it too late for the first epoch of a resumed run
        loaders = (_loader(train, order), _loader(validation, SequentialMiniBatches(validation, size)))
        with _quietly():
            trainer = self._trainer(directory, [history, *self.callbacks])
            _fit(trainer, Shell(classifier, self.settings, seed), loaders, directory / _LAST if done else None)
        with replacing(directory / _HISTORY) as path:  # this file marks the member as complete
            path.write_text(json.dumps(history.epochs) + "\n")

    def _trainer(self, directory: Path, callbacks: list[Callback]) -> Trainer:
        monitor = "validation_loss"
        options: dict[str, Any] = {"save_on_train_epoch_end": True, "enable_version_counter": False}
        best = ModelCheckpoint(directory, Path(_BEST).stem, monitor=monitor, **options)
        last = ModelCheckpoint(directory, Path(_LAST).stem, **options)  # second, to store the state of `best`
        return Trainer(
            accelerator="cpu",
            max_epochs=self.settings.epochs,
            gradient_clip_val=self.settings.gradient_clip,
            callbacks=[EarlyStopping(monitor, patience=self.settings.patience), *callbacks, best, last],
            logger=self.loggers(directory),
            deterministic=True,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def _epochs_done(checkpoint: Path) -> int:
    """Return how many epochs a checkpoint has completed: 0 if it is absent or cannot be read."""
    if not checkpoint.exists():
        return 0
    try:
        return int(torch.load(checkpoint, weights_only=True)["epoch"]) + 1
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError):
        print(f"note: cannot read {checkpoint}; training its member from the start", file=sys.stderr)
        return 0


def _fit(trainer: Trainer, shell: "Shell", loaders: tuple[Any, Any], resume: Path | None) -> None:
    """Fit, and raise KeyboardInterrupt on Ctrl-C, where Lightning would exit the process."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(shell, *loaders, ckpt_path=resume)
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, handler)


class Shell(LightningModule):
    """A Lightning module around a classifier. Randomness depends on the seed and the epoch alone."""

    def __init__(self, classifier: NetworkClassifier, settings: TrainerSettings, seed: int) -> None:
        super().__init__()
        self.classifier = classifier
        self.network = classifier.network_
        self.settings = settings
        self.seed = seed

    def on_train_epoch_start(self) -> None:
        """Set dropout's seed and the cosine learning rate.

        A scheduler's state in a checkpoint lags an epoch behind. Set here, a resumed run gives the same result as an
        uninterrupted one.
        """
        torch.manual_seed(_epoch_seed(self.seed, self.current_epoch) + 1)
        rate, share = self.settings.learning_rate, self.current_epoch / self.settings.epochs
        low = rate / _FINAL_RATE_DIVISOR
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = low + (rate - low) * (1 + math.cos(math.pi * share)) / 2

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Return the loss of a mini-batch."""
        loss = self.classifier.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Log the loss without dropout."""
        self.log("validation_loss", self.classifier.loss(batch), batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(
            self.parameters(), self.settings.learning_rate, weight_decay=self.settings.weight_decay
        )

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, index: int) -> Batch:
        """Return the batch as it is: networks of this size train on the CPU."""
        return batch


class LossHistory(Callback):
    """A callback that records the losses of every epoch, also across restarts, and shows a progress bar."""

    def __init__(self, total: int, member: str, bar: bool) -> None:
        self.total = total
        self.member = member
        self.shown = bar
        self.epochs: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the bar at the first epoch to train."""
        done = len(self.epochs)
        self.bar = bar(total=self.total, initial=done, desc=self.member, unit="epoch", disable=not self.shown)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the losses; Lightning has validated the epoch by now."""
        losses = {name: float(trainer.callback_metrics[name]) for name in ("train_loss", "validation_loss")}
        self.epochs.append({"epoch": trainer.current_epoch, **losses})
        self.bar.set_postfix({name: f"{loss:.3f}" for name, loss in losses.items()}, refresh=False)
        self.bar.update()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        self.bar.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar before the error is printed."""
        if hasattr(self, "bar"):
            self.bar.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the losses, to be stored in a checkpoint."""
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the losses from a checkpoint."""
        self.epochs = list(state_dict["epochs"])


class MiniBatches(Sampler[Tensor]):
    """A sampler of mini-batch indices whose order depends on the seed and the epoch alone."""

    def __init__(self, rows: Batch, size: int, seed: int) -> None:
        self.rows, self.size, self.seed, self.epoch = rows, size, seed, 0

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.size)

    def __iter__(self) -> Iterator[Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_epoch_seed(self.seed, self.epoch))
            return iter(self.rows.shuffled(self.size))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; Lightning calls this at its start."""
        self.epoch = epoch


class SequentialMiniBatches(MiniBatches):
    """A sampler of mini-batch indices without shuffling."""

    def __init__(self, rows: Batch, size: int) -> None:
        super().__init__(rows, size, seed=0)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(torch.arange(len(self.rows)), self.size))


class _Selection(Dataset[Batch]):
    """A dataset over a batch; its items are mini-batches."""

    def __init__(self, rows: Batch) -> None:
        self.rows = rows

    def __getitem__(self, index: Tensor) -> Batch:
        return self.rows.select(index)


def _loader(rows: Batch, order: MiniBatches) -> DataLoader[Batch]:
    # A separate generator: a loader draws a seed for each pass, which would shift dropout's random numbers.
    return DataLoader(_Selection(rows), batch_size=None, sampler=order, generator=torch.Generator())


def _epoch_seed(seed: int, epoch: int) -> int:
    """Return a seed per epoch; members' seeds are far enough apart not to collide."""
    return (seed * 1_000_003 + 2 * epoch) % 2**63


class _quietly(warnings.catch_warnings):  # noqa: N801
    """A context without Lightning's advice about workers and devices, which does not apply to small tables."""

    def __enter__(self) -> None:
        super().__enter__()
        for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        for text in (r".*does not have many workers.*", r".*Checkpoint directory .* exists.*", r".*LeafSpec.*"):
            warnings.filterwarnings("ignore", text)
