"""Lightning: epochs of `fit` end early, with the validation that follows them (checked on lightning 2.6)."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


def _apply_epochs(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """End an epoch in the place where its last batch would be delivered."""
    loop: Any = module._TrainingEpochLoop
    advance, should_validate, start = loop.advance, loop._should_check_val_fx, loop.on_run_start
    record, forward = gpu.record, gpu.forward

    def on_run_start(self: Any, data_fetcher: Any) -> None:
        self.steps_before = len(record.steps)
        start(self, data_fetcher)

    def ended(self: Any, data_fetcher: Any) -> None:
        advance(self, data_fetcher)
        if not data_fetcher.done and forward.ends_epoch(len(record.steps) - self.steps_before):
            data_fetcher.done = self.batch_progress.is_last_batch = True
            self.has_ended_early = True

    def validates(self: Any, data_fetcher: Any) -> bool:
        early = self.__dict__.pop("has_ended_early", False)
        return bool(should_validate(self, data_fetcher)) or (early and self._should_check_val_epoch())

    patches.set(loop, "on_run_start", on_run_start)
    patches.set(loop, "advance", ended)
    patches.set(loop, "_should_check_val_fx", validates)


def _apply_fit(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """End the training after an epoch, and expect its validation."""
    loop: Any = module._FitLoop
    run, end = loop.run, loop.on_advance_end

    def fit(self: Any) -> None:
        def expected() -> str | None:
            trainer = self.trainer
            waits = trainer.enable_validation and not getattr(self.epoch_loop.val_loop, "has_run", False)
            return "evaluation (the validation loop of Lightning)" if waits else None

        gpu.coverage.expected.append(expected)
        run(self)

    def on_advance_end(self: Any) -> None:
        end(self)
        if gpu.forward.ends_training(self.epoch_progress.current.processed):
            self.trainer.should_stop = True
            self.min_epochs, self.epoch_loop.min_steps = 0, None

    patches.set(loop, "run", fit)
    patches.set(loop, "on_advance_end", on_advance_end)


def _apply_evaluation(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    loop: Any = module._EvaluationLoop
    run = loop.run

    def evaluate(self: Any) -> Any:
        outputs = run(self)
        self.has_run = not self.trainer.sanity_checking
        return outputs

    patches.set(loop, "run", evaluate)


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
PATCHES = {
    **{f"{package}.loops.training_epoch_loop": _apply_epochs for package in _PACKAGES},
    **{f"{package}.loops.fit_loop": _apply_fit for package in _PACKAGES},
    **{f"{package}.loops.evaluation_loop": _apply_evaluation for package in _PACKAGES},
}
