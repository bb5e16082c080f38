"""Lightning as a shell around a classifier's network and loss: a fitter that can be stopped and taken up again."""

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

from vramcast.dataset_builder.progress import bar
from vramcast.dataset_builder.store.durable import replacing
from vramcast.models.batch import Batch
from vramcast.models.classifiers import NetworkClassifier
from vramcast.train.settings import TrainerSettings

_LAST, _BEST, _HISTORY = "last.ckpt", "best.ckpt", "history.json"
_SLOWEST = 50
"""The learning rate falls to this part of itself."""


class LightningFitter:
    """The `fitter=` of network classifiers: every call trains one member, in a directory of its own."""

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
        """Train until validation has not improved for a while; the weights of the best epoch are kept."""
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
        history = History(self.settings.epochs, member, self.bar)
        order = MiniBatches(train, size, seed)
        done = _epochs_done(directory / _LAST)
        order.set_epoch(done)  # Lightning says it too late for the first epoch of a run that goes on
        loaders = (_loader(train, order), _loader(validation, InOrder(validation, size)))
        with _quietly():
            trainer = self._trainer(directory, [history, *self.callbacks])
            _fit(trainer, Shell(classifier, self.settings, seed), loaders, directory / _LAST if done else None)
        with replacing(directory / _HISTORY) as path:  # its being there says that the member is done
            path.write_text(json.dumps(history.epochs) + "\n")

    def _trainer(self, directory: Path, callbacks: list[Callback]) -> Trainer:
        monitor = "validation_loss"
        options: dict[str, Any] = {"save_on_train_epoch_end": True, "enable_version_counter": False}
        best = ModelCheckpoint(directory, Path(_BEST).stem, monitor=monitor, **options)
        last = ModelCheckpoint(directory, Path(_LAST).stem, **options)  # second: it keeps what the first one knows
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
    """How many epochs a checkpoint is worth: none if there is none, or if it was being written when the power went."""
    if not checkpoint.exists():
        return 0
    try:
        return int(torch.load(checkpoint, weights_only=True)["epoch"]) + 1
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError):
        print(f"note: {checkpoint} cannot be read; its member is trained from the start", file=sys.stderr)
        return 0


def _fit(trainer: Trainer, shell: "Shell", loaders: tuple[Any, Any], resume: Path | None) -> None:
    """Lightning answers Ctrl-C by ending the process; here it stays an interrupt that the caller hears of."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(shell, *loaders, ckpt_path=resume)
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, handler)


class Shell(LightningModule):
    """A classifier as Lightning wants it. What is random in an epoch follows from seed and epoch alone."""

    def __init__(self, classifier: NetworkClassifier, settings: TrainerSettings, seed: int) -> None:
        super().__init__()
        self.classifier = classifier
        self.network = classifier.network_
        self.settings = settings
        self.seed = seed

    def on_train_epoch_start(self) -> None:
        """Dropout's seed and the learning rate, along a cosine.

        Set here and not by a scheduler, whose state in a checkpoint lags an epoch behind: a run that is taken up again
        goes on as if it had never stopped.
        """
        torch.manual_seed(_epoch_seed(self.seed, self.current_epoch) + 1)
        rate, share = self.settings.learning_rate, self.current_epoch / self.settings.epochs
        low = rate / _SLOWEST
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = low + (rate - low) * (1 + math.cos(math.pi * share)) / 2

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of a mini-batch."""
        loss = self.classifier.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """The loss without dropout."""
        self.log("validation_loss", self.classifier.loss(batch), batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(
            self.parameters(), self.settings.learning_rate, weight_decay=self.settings.weight_decay
        )

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, index: int) -> Batch:
        """As it is: networks of this size are trained where their rows are."""
        return batch


class History(Callback):
    """Keeps the losses of every epoch, also across a restart, and shows them in a bar."""

    def __init__(self, total: int, member: str, bar: bool) -> None:
        self.total = total
        self.member = member
        self.shown = bar
        self.epochs: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the bar where training begins."""
        done = len(self.epochs)
        self.bar = bar(total=self.total, initial=done, desc=self.member, unit="epoch", disable=not self.shown)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is over by now."""
        losses = {name: float(trainer.callback_metrics[name]) for name in ("train_loss", "validation_loss")}
        self.epochs.append({"epoch": trainer.current_epoch, **losses})
        self.bar.set_postfix({name: f"{loss:.3f}" for name, loss in losses.items()}, refresh=False)
        self.bar.update()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the bar."""
        self.bar.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End it before anything is said of the interrupt."""
        if hasattr(self, "bar"):
            self.bar.close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the losses of before."""
        self.epochs = list(state_dict["epochs"])


class MiniBatches(Sampler[Tensor]):
    """Indices of an epoch's mini-batches, in an order that only seed and epoch decide."""

    def __init__(self, rows: Batch, size: int, seed: int) -> None:
        self.rows, self.size, self.seed, self.epoch = rows, size, seed, 0

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.size)

    def __iter__(self) -> Iterator[Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_epoch_seed(self.seed, self.epoch))
            return iter(self.rows.shuffled(self.size))

    def set_epoch(self, epoch: int) -> None:
        """Lightning says which epoch begins."""
        self.epoch = epoch


class InOrder(MiniBatches):
    """The same without shuffling."""

    def __init__(self, rows: Batch, size: int) -> None:
        super().__init__(rows, size, seed=0)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(torch.arange(len(self.rows)), self.size))


class _Selection(Dataset[Batch]):
    """A batch as a dataset whose items are mini-batches."""

    def __init__(self, rows: Batch) -> None:
        self.rows = rows

    def __getitem__(self, index: Tensor) -> Batch:
        return self.rows.select(index)


def _loader(rows: Batch, order: MiniBatches) -> DataLoader[Batch]:
    # a generator of its own: a loader draws a seed for each pass, and may not disturb what dropout draws
    return DataLoader(_Selection(rows), batch_size=None, sampler=order, generator=torch.Generator())


def _epoch_seed(seed: int, epoch: int) -> int:
    """Far enough apart that no two members meet."""
    return (seed * 1_000_003 + 2 * epoch) % 2**63


class _quietly(warnings.catch_warnings):  # noqa: N801
    """Without Lightning's advice about workers and devices, which does not concern tables of this size."""

    def __enter__(self) -> None:
        super().__enter__()
        for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        for text in (r".*does not have many workers.*", r".*Checkpoint directory .* exists.*", r".*LeafSpec.*"):
            warnings.filterwarnings("ignore", text)
