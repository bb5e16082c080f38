"""The subject: the network of a spec as a module, and batches that it takes."""

import torch
from torch import Tensor, nn

from vramcast.dataset_builder.families import FAMILIES, blocks, plan_of
from vramcast.dataset_builder.families.external import build_external
from vramcast.dataset_builder.plan import InputTensor, Node, Plan
from vramcast.dataset_builder.schema import Spec
from vramcast.virtual_gpu.training_step import DTYPES, random_inputs


def build_module(node: Node) -> nn.Module:
    """The module of a plan's node, on the current default device."""
    cls = getattr(blocks, node.kind, None) or getattr(nn, node.kind)
    args = {name: build_module(value) if isinstance(value, Node) else value for name, value in node.args.items()}
    module: nn.Module = cls(*(build_module(child) for child in node.children), **args)
    return module


def build_subject(plan: Plan, dtype: str = "fp32", device: str = "meta") -> nn.Module:
    """The plan's network in training mode; on `meta` it has shapes and no memory."""
    with torch.device(device):
        return build_module(plan.root).to(DTYPES[dtype]).train()


def subject_of(spec: Spec, device: str = "meta") -> tuple[nn.Module, tuple[InputTensor, ...]]:
    """The network of any spec in training mode, and what it is fed."""
    if spec.family in FAMILIES:
        plan = plan_of(spec)
        return build_subject(plan, spec.training.dtype, device), plan.inputs
    subject, inputs = build_external(spec.family, spec.network, device)
    return subject.to(DTYPES[spec.training.dtype]), inputs


def make_inputs(plan: Plan, batch_size: int, dtype: str = "fp32", device: str = "meta") -> tuple[Tensor, ...]:
    """One batch of random inputs."""
    return random_inputs([(item.shape, item.vocabulary) for item in plan.inputs], batch_size, dtype, device)
