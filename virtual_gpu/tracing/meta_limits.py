"""The exceptions with which torch says that plain meta tensors cannot run a network.

Checked with torch 2.4 to 2.13: each class stands for the calls beside it. Any other exception is the network's own.
"""

from vramcast.errors import UntraceableError, UserError

META_LIMITS = (
    UntraceableError,  # of our tracer: a number is read from a tensor, or an operator has no meta function
    NotImplementedError,  # `cpu`, `tolist`, `nonzero`, sparse tensors: no data, or no meta function
    RuntimeError,  # `bool` and indexing of a tensor, tensors of another device, CUDA without a driver, streams
    TypeError,  # `numpy`
    AssertionError,  # `cuda` in a torch without CUDA (torch/cuda/__init__.py, _lazy_init); `assert x.is_cuda`
)


def is_limit_of_meta(error: BaseException) -> bool:
    """Return True if a network that raised this may run on a virtual GPU that it sees as CUDA."""
    if isinstance(error, UntraceableError):
        return True
    return isinstance(error, META_LIMITS) and not isinstance(error, (UserError, RecursionError))
