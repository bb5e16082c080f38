"""Releases of the libraries that a network is made of, which are part of an answer."""

from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

LIBRARIES = (
    "timm", "transformers", "diffusers", "torchvision", "lightning", "pytorch_lightning", "peft", "bitsandbytes",
    "torchao", "torch_geometric",
)  # fmt: skip
"""Libraries whose version is part of an answer if the network has modules of theirs."""


def library_versions(subject: nn.Module) -> dict[str, str]:
    """Return the version of torch, and of each library that the subject has modules of."""
    roots = {type(part).__module__.partition(".")[0] for part in subject.modules()}
    versions = {"torch": str(torch.__version__)}
    for library in LIBRARIES:
        if library in roots:
            try:
                versions[library] = version(library)
            except PackageNotFoundError:
                continue
    return versions
