"""Orthogonal arrays: constructions, verification by counting, and the smallest array for given levels."""

from vramcast.dataset_builder.arrays.choose import OrthogonalArray, orthogonal_array
from vramcast.dataset_builder.arrays.verify import Balance, verify

__all__ = ["orthogonal_array", "verify", "OrthogonalArray", "Balance"]
