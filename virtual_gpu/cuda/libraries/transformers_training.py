"""transformers: the Trainer's epochs and its training can end early (checked on transformers 4.39 and 5.23)."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_STEPS = "steps"


def _apply_flow(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """End epochs and training by the Trainer's own control."""
    flow: Any = module.DefaultFlowCallback
    after_step, after_epoch = flow.on_step_end, flow.on_epoch_end

    def on_epoch_begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps_before = state.global_step

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = after_step(self, args, state, control, **kwargs)
        if gpu.forward.ends_epoch(state.global_step - getattr(self, "steps_before", 0)):
            control.should_epoch_stop = True
            control.should_evaluate = control.should_evaluate or _evaluation(args) == _STEPS
            control.should_save = control.should_save or _value(args.save_strategy) == _STEPS
        return control

    def on_epoch_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = after_epoch(self, args, state, control, **kwargs)
        self.epochs = getattr(self, "epochs", 0) + 1
        if gpu.forward.ends_training(self.epochs):
            control.should_training_stop = True
        return control

    patches.set(flow, "on_epoch_begin", on_epoch_begin)
    patches.set(flow, "on_step_end", on_step_end)
    patches.set(flow, "on_epoch_end", on_epoch_end)


def _apply_trainer(module: ModuleType, patches: Patches, gpu: "CudaEmulation") -> None:
    """Expect the evaluation that a Trainer is configured to do."""
    trainer: Any = module.Trainer
    train, evaluate = trainer.train, trainer.evaluate

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        def expected() -> str | None:
            strategy = _evaluation(self.args)
            waits = strategy != "no" and not self.__dict__.get("has_evaluated")
            return f"evaluation (eval_strategy={strategy} of the Trainer)" if waits else None

        gpu.coverage.expected.append(expected)
        return train(self, *args, **kwargs)

    def evaluated(self: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = evaluate(self, *args, **kwargs)
        self.has_evaluated = True
        return metrics

    patches.set(trainer, "train", trained)
    patches.set(trainer, "evaluate", evaluated)


def _evaluation(args: Any) -> str:
    """Return when a Trainer evaluates; before transformers 4.41 the option had its long name alone."""
    return _value(args.eval_strategy if hasattr(args, "eval_strategy") else args.evaluation_strategy)


def _value(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


PATCHES = {
    "transformers.trainer_callback": _apply_flow,
    "transformers.trainer": _apply_trainer,
}
