"""States of random generators in compiled graphs: they hold no memory of the device, and meta has no generator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vramcast.virtual_gpu.operators.autocast import replaced


@contextmanager
def without_generator_states() -> Iterator[None]:
    """Keep the partitioner from saving the state of generators for operators that are recomputed."""
    from torch._functorch import partitioners  # noqa: PLC0415 - takes seconds to import

    def unchanged(joint: Any, forward: Any, backward: Any, outputs: int, *_: Any) -> tuple[Any, Any]:
        return forward, backward

    with replaced(partitioners, "functionalize_rng_ops", unchanged):
        yield
