"""Builds the subject of a spec, the network as a module, and batches for it."""

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vramcast.errors import UserError
from vramcast.jobs.families import FAMILIES, blocks, plan_of
from vramcast.jobs.families.external import build_external
from vramcast.jobs.plan import InputTensor, Node, Plan
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.training.step import DTYPES, images_channels_last, random_inputs

Batch = TypeVar("Batch")
_VOLUME_DIMS = 5


def build_module(node: Node) -> nn.Module:
    """Build the module of a node, on the current default device."""
    cls = getattr(blocks, node.kind, None) or getattr(nn, node.kind)
    args = {name: build_module(value) if isinstance(value, Node) else value for name, value in node.args.items()}
    module: nn.Module = cls(*(build_module(child) for child in node.children), **args)
    return module


def build_subject(plan: Plan, dtype: str = "fp32", device: str = "meta") -> nn.Module:
    """Build the network of a plan in training mode; on `meta` it takes no memory."""
    with torch.device(device):
        return build_module(plan.root).to(DTYPES[dtype]).train()


def subject_of(spec: Spec, device: str = "meta") -> tuple[nn.Module, tuple[InputTensor, ...]]:
    """Build the network of any spec in training mode, and return its inputs with it."""
    if spec.family in FAMILIES:
        plan = plan_of(spec)
        return build_subject(plan, spec.training.dtype, device), plan.inputs
    subject, inputs = build_external(spec.family, spec.network, device)
    return subject.to(DTYPES[spec.training.dtype]), inputs


def in_channels_last(subject: nn.Module) -> nn.Module:
    """Convert a network to channels-last layout, in place."""
    if any(item.dim() == _VOLUME_DIMS for item in (*subject.parameters(), *subject.buffers())):
        raise UserError(
            "expected no 3-D convolutions beside channels_last, found parameters of five dimensions, which torch does "
            "not convert: leave channels_last out"
        )
    return subject.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def batch_in_channels_last(batch: Batch) -> Batch:
    """Return a batch, of any structure, whose images have their channels last in memory."""
    arranged: Batch = tree_map_only(Tensor, lambda item: images_channels_last((item,))[0], batch)
    return arranged


def make_inputs(plan: Plan, batch_size: int, dtype: str = "fp32", device: str = "meta") -> tuple[Tensor, ...]:
    """Return one batch of random inputs."""
    return random_inputs([(item.shape, item.vocabulary) for item in plan.inputs], batch_size, dtype, device)
