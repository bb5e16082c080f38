"""Say, before a training job starts, how much GPU memory it will take.

>>> import vramcast
>>> print(vramcast.classify(module, inputs, optimizer="adamw", device="rtx_4090"))

Importing the package is cheap: torch is imported with the first call.
"""

from typing import TYPE_CHECKING, Any

from vramcast.version import __version__

__all__ = [
    "Answer", "LightningCallback", "Predictor", "TrainerCallback", "VirtualGPU", "__version__", "classify", "devices",
    "load",
]  # fmt: skip

if TYPE_CHECKING:
    from vramcast.collocation.callbacks.lightning_callback import LightningCallback
    from vramcast.collocation.callbacks.trainer_callback import TrainerCallback
    from vramcast.models.answer import Answer
    from vramcast.models.predictor import Predictor
    from vramcast.virtual_gpu_context import VirtualGPU

_LAZY = {
    "Answer": "vramcast.models.answer",
    "LightningCallback": "vramcast.collocation.callbacks.lightning_callback",
    "Predictor": "vramcast.models.predictor",
    "TrainerCallback": "vramcast.collocation.callbacks.trainer_callback",
    "VirtualGPU": "vramcast.virtual_gpu_context",
}
_CHECKPOINT = "universal"


def classify(module: Any, inputs: Any, *, checkpoint: str = _CHECKPOINT, **options: Any) -> "Answer":
    """Return how much of a device the training of a module takes, and whether it fits.

    Args:
        module: The `torch.nn.Module` to train. It is neither changed nor run on data.
        inputs: One batch (a tensor, a tuple of arguments, or a mapping of keyword arguments), or a function from a
            batch size to one.
        checkpoint: The estimator, by its released name or its directory.
        options: `optimizer`, `device`, `batch_size`, `dtype`, `autocast`, `checkpointing`, `loss_form`, `liger`,
            `accumulate`, `step`, `risk` and the other arguments of `Predictor.classify`.
    """
    return load(checkpoint).classify(module, inputs, **options)


def load(name: str = _CHECKPOINT) -> "Predictor":
    """Return the predictor of a checkpoint, by its released name or its directory; each is read once."""
    if name not in _predictors:
        from vramcast.models.predictor import Predictor  # noqa: PLC0415 - imports torch

        _predictors[name] = Predictor.load(name)
    return _predictors[name]


_predictors: "dict[str, Predictor]" = {}


def devices() -> dict[str, str]:
    """Return the titles of all device profiles by name."""
    from vramcast.device.profiles import device_names, read_device  # noqa: PLC0415 - imports yaml

    return {name: str(read_device(name)["title"]) for name in device_names()}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_LAZY[name]), name)
