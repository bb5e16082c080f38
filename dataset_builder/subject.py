"""The subject: the network of a plan as a module, with inputs and targets to train it on."""

from typing import Any

import torch
from torch import Tensor, nn

from dataset_builder.families import blocks
from dataset_builder.plan import Node, Plan

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_module(node: Node) -> nn.Module:
    """The module of a plan's node, on the current default device."""
    cls = getattr(blocks, node.kind, None) or getattr(nn, node.kind)
    args = {name: build_module(value) if isinstance(value, Node) else value for name, value in node.args.items()}
    module: nn.Module = cls(*(build_module(child) for child in node.children), **args)
    return module


def build_subject(plan: Plan, dtype: str = "fp32", device: str = "meta") -> nn.Module:
    """The plan's network in training mode; on `meta` it has shapes and no memory."""
    with torch.device(device):
        return build_module(plan.root).to(TORCH_DTYPES[dtype]).train()


def make_inputs(plan: Plan, batch_size: int, dtype: str = "fp32", device: str = "meta") -> tuple[Tensor, ...]:
    """One batch of random inputs."""
    made = []
    for item in plan.inputs:
        shape = (batch_size, *item.shape)
        if item.vocabulary is None:
            made.append(torch.randn(shape, device=device, dtype=TORCH_DTYPES[dtype]))
        else:
            made.append(torch.randint(item.vocabulary, shape, device=device))
    return tuple(made)


def make_targets(loss: str, output: Tensor) -> Tensor:
    """Random targets that fit the output under that loss."""
    if loss == "cross_entropy":
        return torch.randint(output.shape[-1], output.shape[:-1], device=output.device)
    return torch.rand_like(output)


def loss_of(loss: str, output: Tensor, targets: Tensor) -> Tensor:
    """The loss by its name in a spec. Sequences count as so many samples."""
    functions: dict[str, Any] = {
        "bce_with_logits": nn.functional.binary_cross_entropy_with_logits,
        "bce": nn.functional.binary_cross_entropy,
        "mse": nn.functional.mse_loss,
    }
    if loss == "cross_entropy":
        return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())
    result: Tensor = functions[loss](output, targets)
    return result
