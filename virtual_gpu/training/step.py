"""The training step that every backend runs and that `emit` prints: these functions need torch alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def random_inputs(
    shapes: Sequence[tuple[tuple[int, ...], int | None]], batch_size: int, dtype: str, device: str
) -> tuple[Tensor, ...]:
    """Return one batch: numbers, or tokens if there is a vocabulary."""
    return tuple(
        torch.randn(batch_size, *shape, device=device, dtype=DTYPES[dtype])
        if vocabulary is None
        else torch.randint(vocabulary, (batch_size, *shape), device=device)
        for shape, vocabulary in shapes
    )


def images_channels_last(batch: Iterable[Any]) -> tuple[Any, ...]:
    """Return a batch whose images have their channels last in memory."""
    return tuple(
        item.contiguous(memory_format=torch.channels_last) if isinstance(item, Tensor) and item.dim() == 4 else item
        for item in batch
    )


def random_targets(loss: str, output: Tensor) -> Tensor:
    """Return random targets for an output under this loss."""
    if loss == "cross_entropy":
        return torch.randint(output.shape[-1], output.shape[:-1], device=output.device)
    return torch.rand_like(output)


def loss_of(loss: str, output: Any) -> Tensor:
    """Return the loss by its name, with random targets. Each position of a sequence counts as a sample."""
    if loss == "own":
        value: Tensor = output.loss
        return value
    targets = random_targets(loss, output)
    if loss == "cross_entropy":
        return F.cross_entropy(output.flatten(0, -2), targets.flatten())
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "bce_with_logits": F.binary_cross_entropy_with_logits,
        "bce": F.binary_cross_entropy,
        "mse": F.mse_loss,
    }
    return functions[loss](output, targets)


def make_optimizer(
    name: str, arguments: dict[str, Any], implementation: str, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer of torch.optim; 'default' leaves the choice of implementation to torch."""
    choices: dict[str, dict[str, bool]] = {
        "default": {},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "single": {"foreach": False},
    }
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **arguments, **choices[implementation])
    return optimizer


def inference_steps(
    run: Callable[..., Any],
    batches: Iterable[Iterable[tuple[Any, ...]]],
    gradients_off: Callable[[], AbstractContextManager[Any]],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Any]:
    """Run a network without gradients and yield outputs, each of which lives until the next is assigned to its name."""
    for parts in batches:
        for inputs in parts:
            with gradients_off(), autocast():
                output = run(*inputs)
            del inputs
            yield output


def training_steps(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Iterable[tuple[Tensor, ...]]],
    loss: str,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scaler: torch.amp.GradScaler | None = None,
    zero_grad: str = "before_forward",
) -> Iterator[Tensor]:
    """Run the usual loop and yield losses: one optimizer step per batch, or per several with accumulated gradients.

    As in most scripts, output and loss live until the next ones are assigned to their names. Inputs do not: a loop over
    a loader assigns the next batch on the host to their name before copying it to the device. `zero_grad` says when
    old gradients are dropped: before_forward, before_backward or after_step.
    """
    for parts in batches:
        for index, inputs in enumerate(parts):
            if index == 0 and zero_grad == "before_forward":
                optimizer.zero_grad()
            with autocast():
                output = network(*inputs)
                value = loss_of(loss, output)
            if index == 0 and zero_grad == "before_backward":
                optimizer.zero_grad()
            scaled: Any = scaler.scale(value) if scaler else value
            scaled.backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        del inputs
        yield value.detach()
        if zero_grad == "after_step":
            optimizer.zero_grad()
