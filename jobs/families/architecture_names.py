"""The architecture of a spec's network: a split by it trains on no relative of a tested network."""

from typing import Any

from vramcast.jobs.families.libraries import import_library
from vramcast.jobs.spec import Spec


def architecture_of(spec: Spec) -> str:
    """Return the module of its library that defines a network, as in 'timm/resnet' or 'hf/llama'.

    A detector has the architecture of its backbone. A network of no library is an architecture of its own.
    """
    name = spec.network.get("name") or spec.network.get("architecture")
    if spec.family in ("timm", "detector"):
        import_library("timm")
        registry: Any = import_library("timm.models")
        return f"timm/{registry.model_entrypoint(str(name)).__module__.rpartition('.')[2]}"
    if spec.family == "hf":
        return f"hf/{getattr(import_library('transformers'), str(name)).__module__.split('.')[-2]}"
    if spec.family in ("diffusers", "torchvision", "script"):
        return f"{spec.family}/{name}"
    return f"{spec.family}/{spec.group}"
