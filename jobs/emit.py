"""Prints a spec as a training script that needs only torch, so that any row can be reproduced on any GPU."""

import inspect
from pprint import pformat
from string import Template

from vramcast.errors import UserError
from vramcast.jobs.families import blocks, plan_of
from vramcast.jobs.plan import Node, Plan
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.training import step as training
from vramcast.virtual_gpu.training.setup import parse_call

_INDENT = "    "
_FUNCTIONS = (
    training.random_inputs,
    training.images_channels_last,
    training.random_targets,
    training.loss_of,
    training.make_optimizer,
    training.training_steps,
)
_SCRIPT = Template('''\
"""A $family network with its training step. Needs torch only.

Spec $id, printed by vramcast:
$spec
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INPUTS = $inputs


$blocks


def build() -> nn.Module:
    return $network


$functions


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on random data and print the peak GPU memory.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of three full batches and the smaller last batch")
    options = parser.parse_args()

    torch.backends.cudnn.benchmark = $cudnn_benchmark
    with torch.device(options.device):
        network = build().to(DTYPES["$dtype"]).train()$layout
    for _ in range($dry_run_passes):  # forward passes before training, as a layer summary makes them
        network(*$arranged(random_inputs(INPUTS, $dry_run_batch_size, "$dtype", options.device)))
    optimizer = make_optimizer("$optimizer", $arguments, "$implementation", network.parameters())
    scaler = $scaler
    sizes = [$epoch] * options.epochs
    batches = (
        ($arranged(random_inputs(INPUTS, size, "$dtype", options.device)) for _ in range($accumulate)) for size in sizes
    )
    losses = training_steps(network, optimizer, batches, "$loss", $autocast, scaler, "$zero_grad")
    for size, loss in zip(sizes, losses):
        print(f"batch {size}: loss {loss.item():.4f}")
    if options.device.startswith("cuda"):
        for name in ("allocated_bytes", "reserved_bytes"):
            print(f"{name}: {torch.cuda.memory_stats(options.device)[name + '.all.peak']}")


if __name__ == "__main__":
    main()
''')


def emit(spec: Spec) -> str:
    """Return the script of a spec."""
    plan, setup = plan_of(spec), spec.training
    if setup.needs_trace:
        raise UserError(
            f"expected the usual step of one GPU in a printed script, found {', '.join(setup.traced_options)}: leave "
            "it out; checkpointing may be true"
        )
    optimizer, arguments = parse_call(setup.optimizer)
    full, last = [setup.batch_size] * 3, [setup.last_batch_size] if setup.last_batch_size else []
    return _SCRIPT.substitute(
        family=spec.family,
        id=spec.id,
        spec=escaped(pformat(spec.to_json(), width=110)),
        inputs=[(item.shape, item.vocabulary) for item in plan.inputs],
        blocks=_block_sources(plan),
        network=source_of(plan.root, depth=1),
        functions="\n\n".join(inspect.getsource(function) for function in _FUNCTIONS).rstrip(),
        dtype=setup.dtype,
        cudnn_benchmark=setup.cudnn_benchmark,
        layout=".to(memory_format=torch.channels_last)" if setup.channels_last else "",
        arranged="images_channels_last" if setup.channels_last else "",
        dry_run_passes=setup.dry_run_passes if setup.dry_run_batch_size else 0,
        dry_run_batch_size=setup.dry_run_batch_size or 0,
        optimizer=optimizer,
        arguments=dict(arguments),
        implementation=setup.implementation,
        scaler="torch.amp.GradScaler(options.device)" if setup.autocast == "fp16" else "None",
        epoch=", ".join(map(str, full + last)),
        accumulate=setup.accumulate,
        loss=setup.loss,
        autocast=_autocast_source(setup.autocast),
        zero_grad=setup.zero_grad,
    )


def _autocast_source(dtype: str | None) -> str:
    return "nullcontext" if dtype is None else f'lambda: torch.autocast(options.device, DTYPES["{dtype}"])'


def escaped(text: str) -> str:
    """Escape a text for a docstring: a spec may come from anywhere, and must not end it."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _block_sources(plan: Plan) -> str:
    """Return the source of every class in `blocks` that the plan uses."""
    kinds = dict.fromkeys(node.kind for node in plan.root.walk() if hasattr(blocks, node.kind))
    return "\n\n".join(inspect.getsource(getattr(blocks, kind)) for kind in kinds).rstrip()


def source_of(node: Node, depth: int = 0) -> str:
    """Return the expression that builds a node, with one child per line."""
    prefix = "" if hasattr(blocks, node.kind) else "nn."
    args = [
        f"{name}={source_of(value) if isinstance(value, Node) else repr(value)}" for name, value in node.args.items()
    ]
    if not node.children:
        return f"{prefix}{node.kind}({', '.join(args)})"
    inner = _INDENT * (depth + 1)
    lines = [f"{inner}{text},\n" for text in (*(source_of(child, depth + 1) for child in node.children), *args)]
    return f"{prefix}{node.kind}(\n{''.join(lines)}{_INDENT * depth})"
