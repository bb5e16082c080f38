"""The usual error of a simulation, learned from measured jobs: extremely randomised trees, stored as plain arrays.

The trees do not correct an estimate. They tell jobs whose workspaces a rule guesses well from jobs whose workspaces it
does not, so that the margin of a few jobs does not apply to all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_TREES = 60
_LEAST_LEAF = 4
_FEATURE_SHARE = 1.0
_FOLDS = 10
_MOST_ERROR = 1.0
"""Larger relative errors count as this one: a single row would decide the mean of its leaf."""
_LEAF = -1


@dataclass(frozen=True)
class ErrorScale:
    """Trees as arrays over their nodes; the children of a leaf are itself."""

    roots: NDArray[np.int32]
    children: NDArray[np.int32]
    """[nodes, 2]: the nodes for values up to the threshold, and above it."""
    columns: NDArray[np.int32]
    thresholds: NDArray[np.float64]
    values: NDArray[np.float32]

    @classmethod
    def fit(cls, matrix: Array, relative_errors: Array, seed: int) -> Self:
        """Fit trees to the errors above an estimate, relative to it; [n, features] and [n]."""
        from sklearn.ensemble import ExtraTreesRegressor  # noqa: PLC0415 - reading a checkpoint needs no scikit-learn

        forest = ExtraTreesRegressor(
            _TREES, min_samples_leaf=_LEAST_LEAF, max_features=_FEATURE_SHARE, random_state=seed
        )
        forest.fit(matrix.astype(np.float32), np.clip(relative_errors, 0, _MOST_ERROR))
        trees = [item.tree_ for item in forest.estimators_]
        starts = np.cumsum([0, *(tree.node_count for tree in trees)])
        return cls(
            roots=starts[:-1].astype(np.int32),
            children=np.concatenate([_children(tree) + start for tree, start in zip(trees, starts, strict=False)]),
            columns=np.concatenate([np.maximum(tree.feature, 0) for tree in trees]).astype(np.int32),
            thresholds=np.concatenate([tree.threshold for tree in trees]),
            values=np.concatenate([tree.value[:, 0, 0] for tree in trees]).astype(np.float32),
        )

    def predict(self, matrix: Array) -> Array:
        """Return [n]: the usual error above the estimate, relative to it."""
        rows = np.arange(len(matrix))[:, None]
        columns = matrix.astype(np.float32)
        nodes = np.broadcast_to(self.roots, (len(matrix), len(self.roots)))
        while True:
            above = columns[rows, self.columns[nodes]] > self.thresholds[nodes]
            following = self.children[nodes, above.astype(np.int8)]
            if np.array_equal(following, nodes):
                return np.asarray(self.values[nodes].mean(axis=1), dtype=np.float64)
            nodes = following

    @classmethod
    def of_other_folds(cls, matrix: Array, relative_errors: Array, designs: Sequence[str], seed: int) -> Array:
        """Return [n]: predictions for rows by trees that have seen no row of the same design."""
        from vramcast.dataset_builder.store.splits import make_folds  # noqa: PLC0415 - answers need no splits

        split = make_folds(designs, min(_FOLDS, len(set(designs))), seed)
        parts = np.array([split.part_of(design) for design in designs])
        scales = np.zeros(len(matrix))
        for part in split.parts:
            own = parts == part
            scales[own] = cls.fit(matrix[~own], relative_errors[~own], seed).predict(matrix[own])
        return scales

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the arrays that a checkpoint stores."""
        return dict(vars(self))

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Self:
        """Restore the trees of a checkpoint."""
        return cls(**dict(arrays))  # type: ignore[arg-type]


def _children(tree: object) -> NDArray[np.int32]:
    """Return [nodes, 2] of one tree."""
    own = np.arange(tree.node_count)  # type: ignore[attr-defined]
    sides = [np.where(side == _LEAF, own, side) for side in (tree.children_left, tree.children_right)]  # type: ignore[attr-defined]
    return np.stack(sides, axis=1).astype(np.int32)
