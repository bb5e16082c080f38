"""The training run that is measured: the steps of `virtual_gpu.training_step` on a device."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from vramcast.errors import UserError
from vramcast.jobs.spec import Spec
from vramcast.jobs.subject import in_channels_last, subject_of
from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call
from vramcast.virtual_gpu.training.step import (
    DTYPES,
    images_channels_last,
    make_optimizer,
    random_inputs,
    training_steps,
)


def step_sizes(setup: TrainingSetup, epochs: int) -> list[int]:
    """Return the batch size of every step: two to warm up, epochs of two batches and the odd last one, a last step.

    The virtual GPU traces the same run, so that both see the allocator in the same states.
    """
    full, odd = setup.batch_size, [setup.last_batch_size] if setup.last_batch_size else []
    return [full, full, *([full, full, *odd] * epochs), full]


def training_run(spec: Spec, epochs: int, device: str) -> Iterator[int]:
    """Train a spec's network on random data; yield the batch size of each step after the step."""
    setup = spec.training
    if setup.needs_trace:
        raise UserError(
            f"expected a spec that one GPU trains whole, found {', '.join(setup.traced_options)}: simulate it"
        )
    torch.backends.cudnn.benchmark = setup.cudnn_benchmark
    subject, inputs = subject_of(spec, "cpu")
    arranged = images_channels_last if setup.channels_last else tuple
    if setup.channels_last:
        in_channels_last(subject)
    # Converted before the move, and not built on the GPU: copies in another layout or dtype would stay in its cache.
    subject.to(device)
    shapes = [(item.shape, item.vocabulary) for item in inputs]
    ahead = _prefetched(shapes, setup, device)
    if setup.dry_run_batch_size:
        for _ in range(setup.dry_run_passes):
            batch = arranged(random_inputs(shapes, setup.dry_run_batch_size, setup.dtype, device))
            subject(*batch)
        del batch
    name, arguments = parse_call(setup.optimizer)
    parameters = [item for item in subject.parameters() if item.requires_grad]
    optimizer = make_optimizer(name, dict(arguments), setup.implementation, parameters)
    sizes = step_sizes(setup, epochs)
    batches = (
        (arranged(random_inputs(shapes, size, setup.dtype, device)) for _ in range(setup.accumulate)) for size in sizes
    )
    scaler = torch.amp.GradScaler(device) if setup.autocast == "fp16" else None
    autocast = (lambda: torch.autocast(device, DTYPES[setup.autocast or ""])) if setup.autocast else nullcontext
    steps = training_steps(subject, optimizer, batches, setup.loss, autocast, scaler, setup.zero_grad)
    for size, _ in zip(sizes, steps, strict=False):  # strict would request one more step, and so another batch
        yield size
    del ahead


def _prefetched(
    shapes: list[tuple[tuple[int, ...], int | None]], setup: TrainingSetup, device: str
) -> list[tuple[torch.Tensor, ...]]:
    """Return the batches that a loader holds ready; on CUDA it has its own stream, and so its own memory pool."""
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():  # type: ignore[no-untyped-call]
        made = (random_inputs(shapes, setup.batch_size, setup.dtype, device) for _ in range(setup.prefetched_batches))
        return [images_channels_last(batch) if setup.channels_last else batch for batch in made]
