"""The stand-in for Triton: kernels that do nothing. A kernel writes to tensors that its caller has allocated.

Liger-Kernel is Python code around such kernels, so all of its allocations happen without them.
"""

from collections.abc import Callable
from typing import Any

VERSION = "3.4.0"


class _Anything:
    """Stands for any name of Triton that the body or the signature of a kernel mentions."""

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):  # such as __path__, by which Python tells modules from others
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: object) -> "_Anything":
        return _Anything()

    def __call__(self, *args: object, **kwargs: object) -> "_Anything":
        return _Anything()


class constexpr:  # noqa: N801 - Triton's name
    """A constant of a kernel, whose value the Python code around kernels compares."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, constexpr) else value

    def __eq__(self, other: object) -> bool:
        return bool(self.value == (other.value if isinstance(other, constexpr) else other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __index__(self) -> int:
        return int(self.value)


def missing(name: str) -> _Anything:
    """Return a placeholder for a name that this stand-in does not define."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()


class JITFunction:
    """A kernel whose launches do nothing."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")

    def __getitem__(self, grid: object) -> Callable[..., None]:
        """Return the launch over a grid."""
        return self.run  # which triton_kernels replaces

    def run(self, *args: object, **kwargs: object) -> None:
        """Launch nothing."""


def jit(fn: Any = None, **options: object) -> Any:
    """Decorate a kernel, with or without options."""
    return JITFunction if fn is None else JITFunction(fn)


def autotune(*args: object, **options: object) -> Callable[[Any], Any]:
    """Decorate a kernel that would try several configurations."""
    return lambda kernel: kernel


heuristics = autotune


class Config:
    """A configuration that a kernel would be tuned over."""

    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs = kwargs
        self.options = options


def cdiv(x: int, y: int) -> int:
    """Divide and round up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return int(1 << max(n - 1, 0).bit_length())
