"""Orthogonal arrays: constructions, a proof by counting, and the smallest one for given levels."""

from vramcast.dataset_builder.arrays.choose import OrthogonalArray, orthogonal_array
from vramcast.dataset_builder.arrays.verify import Balance, verify

__all__ = ["orthogonal_array", "verify", "OrthogonalArray", "Balance"]
