"""Names of buckets, shared by the pictures of a run."""

from itertools import pairwise

from vramcast.models.buckets import Buckets
from vramcast.virtual_gpu.allocator.sizes import MIB

GIB = 2**30
DOES_NOT_FIT = "does not fit"


def unit_of(buckets: Buckets) -> tuple[str, int]:
    """Return the unit (name, bytes) in which the edges of buckets are whole numbers."""
    return ("GiB", GIB) if buckets.width_bytes % GIB == 0 else ("MiB", MIB)


def bucket_names(buckets: Buckets) -> list[str]:
    """Return names such as '2-3', in the unit of `unit_of`; the last is 'does not fit'."""
    _, unit_bytes = unit_of(buckets)
    digits = ".4g" if unit_bytes == GIB else ".0f"
    edges = [f"{edge / unit_bytes:{digits}}" for edge in buckets.edges_bytes]
    return [*(f"{low}-{high}" for low, high in pairwise(edges)), DOES_NOT_FIT]
