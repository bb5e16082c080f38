"""Families: the kinds of networks that a spec can describe, and their plans."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vramcast.errors import UserError, suggestion
from vramcast.jobs.families import cnn, mlp, template, transformer
from vramcast.jobs.plan import Plan
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.canonical import from_mapping, without_defaults
from vramcast.virtual_gpu.training.setup import TrainingSetup


@dataclass(frozen=True)
class Family:
    """A kind of network: the dataclass of its factors, and the function that turns them into a plan."""

    network: type
    plan: Callable[[Any], Plan]
    unused: Callable[[Any], Collection[str]] = lambda _: ()
    """Return the factors with a default that do not affect a network with these other factors."""


FAMILIES: Mapping[str, Family] = {
    "mlp": Family(mlp.MlpNetwork, mlp.plan),
    "cnn": Family(cnn.CnnNetwork, cnn.plan, cnn.unused),
    "template": Family(template.TemplateNetwork, template.plan, template.unused),
    "transformer": Family(transformer.TransformerNetwork, transformer.plan, transformer.unused),
}


EXTERNAL_FAMILIES = ("timm", "torchvision", "hf", "diffusers", "recurrent", "unet", "detector", "random")
"""Families whose networks have no plan: only running them shows whether they can be trained."""


def family_of(name: str) -> Family:
    """Return the family of this name."""
    if name not in FAMILIES:
        raise UserError(
            f"expected a family that can be built here, one of {sorted(FAMILIES)}, found {name!r}: "
            f"{suggestion(name, FAMILIES)}"
        )
    return FAMILIES[name]


def make_spec(family: str, network: Mapping[str, Any], training: TrainingSetup) -> Spec:
    """Return a spec in canonical form: factors are checked, those at their default or without effect are left out."""
    kind = family_of(family)
    factors: Any = from_mapping(kind.network, network, f"the {family} network")
    types, unused = {item.name: item.type for item in fields(factors)}, kind.unused(factors)
    relevant = {name: value for name, value in without_defaults(factors).items() if name not in unused}
    return Spec(family, {name: _plain(value, types[name]) for name, value in relevant.items()}, training)


def _plain(value: Any, kind: Any = None) -> Any:
    """Return a factor as JSON would, so that 0 and 0.0, or a tuple and a list, give the same spec."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return float(value) if kind is float else value


def plan_of(spec: Spec) -> Plan:
    """Return the plan of a spec's network, with checkpointing if its training setup uses it in its default form."""
    family = family_of(spec.family)
    plan = family.plan(from_mapping(family.network, spec.network, f"the {spec.family} network"))
    return _checkpointed(plan) if spec.training.checkpointing is True else plan


def _checkpointed(plan: Plan) -> Plan:
    if plan.root.kind == "EncoderDecoder":
        source, *rest = plan.root.children
        children = (replace(source, kind="CheckpointedSequential"), *rest)
        return replace(plan, root=replace(plan.root, args={"checkpointing": True}, children=children))
    kind = "CheckpointedSequential"
    children = tuple(replace(item, kind=kind) if item.kind == "Encoder" else item for item in plan.root.children)
    return replace(plan, root=replace(plan.root, kind=kind, children=children))
