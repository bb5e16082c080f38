"""A callback of transformers' Trainer that compares the run with its forecast."""

from typing import Any

from transformers import trainer_callback

from vramcast.collocation.callbacks.run_observer import RunObserver


class TrainerCallback(trainer_callback.TrainerCallback):  # type: ignore[misc, name-defined, unused-ignore]
    """Compares the first steps with a forecast, logs the result to the logger `vramcast`, and reports the peak.

    Example:
        >>> Trainer(..., callbacks=[vramcast.TrainerCallback("forecast.json")])

    The arguments are those of `RunObserver`. On several GPUs the first process compares its own.
    """

    def __init__(self, forecast: Any, **options: Any) -> None:
        self.observer = RunObserver(forecast, **options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note an optimizer step."""
        if state.is_world_process_zero:
            self.observer.note_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the end."""
        if state.is_world_process_zero:
            self.observer.note_end(state.global_step)
