"""The patches of torch that compiling without a GPU needs, by release: one table, checked release by release.

| attribute | why |
| --- | --- |
| `OpOverload.py_kernels` | composite operators with a Python kernel on meta hide their gradient from AOTAutograd |
| `partitioners.functionalize_rng_ops` | states of generators hold no memory, and a meta device has none |
| `convert_frame._compile` | while Dynamo compiles, torch is as it was and nothing is traced |
| `GuardBuilder`: `id_match_unchecked`, `ID_MATCH`, `CLOSURE_MATCH` | guards on replaced functions would always fail |
| `SubgraphTracer.create_proxy`, `FakeTensorMode.dispatch` | tensors that compiled code makes on CUDA are meta tensors |
| `TensorVariable.method_attr_device`, `method_attr_is_cuda` | compiled code that asks where a tensor is gets CUDA |
"""

import re

import torch

SUPPORTED = tuple(f"2.{minor}" for minor in range(6, 14))
"""Releases whose sources have every attribute of the table. The tests have run on 2.13 alone."""


def release() -> str:
    """Return the release of torch, such as '2.13'."""
    match = re.match(r"\d+\.\d+", torch.__version__)
    return match[0] if match else torch.__version__


def is_supported() -> bool:
    """Return whether compiled code can be simulated on this release of torch."""
    return release() in SUPPORTED


def unknown_release() -> str:
    """Return the note for a release without a row in the table."""
    return (
        f"torch {release()} is not among the releases whose compiler can be simulated ({SUPPORTED[0]} to "
        f"{SUPPORTED[-1]}): compiled code is simulated as eager code"
    )
