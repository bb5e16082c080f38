"""The names of the networks that the installed libraries build without downloading anything."""

from importlib.util import find_spec

from vramcast.errors import UserError
from vramcast.jobs.architectures import architecture_names
from vramcast.jobs.diffusion_architectures import denoiser_names
from vramcast.jobs.families.libraries import import_library
from vramcast.jobs.targets import LIBRARIES


def library_names() -> dict[str, list[str]]:
    """Return the names by library; a library that is not installed has none."""
    names: dict[str, list[str]] = {}
    for library in LIBRARIES:
        try:
            names[library] = _names(library)
        except UserError:
            names[library] = []
    return names


def _names(library: str) -> list[str]:
    if library == "hf":
        return architecture_names() if find_spec("transformers") else []
    if library == "diffusers":
        return denoiser_names() if find_spec("diffusers") else []
    module = import_library(library)
    listed: list[str] = module.list_models() if library == "timm" else module.models.list_models()
    return listed
