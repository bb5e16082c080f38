"""Builds the subject of a spec, the network as a module, and batches for it."""

import torch
from torch import Tensor, nn

from vramcast.dataset_builder.families import FAMILIES, blocks, plan_of
from vramcast.dataset_builder.families.external import build_external
from vramcast.dataset_builder.plan import InputTensor, Node, Plan
from vramcast.dataset_builder.schema import Spec
from vramcast.virtual_gpu.training_step import DTYPES, random_inputs


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


def make_inputs(plan: Plan, batch_size: int, dtype: str = "fp32", device: str = "meta") -> tuple[Tensor, ...]:
    """Return one batch of random inputs."""
    return random_inputs([(item.shape, item.vocabulary) for item in plan.inputs], batch_size, dtype, device)
