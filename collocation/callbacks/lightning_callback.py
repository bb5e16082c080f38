"""A callback of Lightning that compares the run with its forecast."""

from typing import Any

from lightning.pytorch import Callback

from vramcast.collocation.callbacks.run_observer import RunObserver


class LightningCallback(Callback):
    """Compares the first steps with a forecast, logs the result to the logger `vramcast`, and reports the peak.

    Example:
        >>> Trainer(..., callbacks=[vramcast.LightningCallback("forecast.json")])

    The arguments are those of `RunObserver`. On several GPUs the first process compares its own.
    """

    def __init__(self, forecast: Any, **options: Any) -> None:
        self.observer = RunObserver(forecast, **options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the optimizer steps so far: with accumulation, a batch is none."""
        if trainer.is_global_zero:
            self.observer.note_step(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Note the end."""
        if trainer.is_global_zero:
            self.observer.note_end(trainer.global_step)
