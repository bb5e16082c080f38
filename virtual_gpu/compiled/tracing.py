"""Tells whether torch traces a graph: kernel rules that allocate without computing must compute then."""

import torch

_PROXY = torch._C._TorchDispatchModeKey.PROXY


def traces_graph() -> bool:
    """Return whether operators are being recorded in a graph, in which each must depend on its inputs."""
    return torch._C._get_dispatch_mode(_PROXY) is not None
