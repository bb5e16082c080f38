"""Extremely randomised trees as plain arrays, which a checkpoint stores and reads without scikit-learn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LEAF = -1


@dataclass(frozen=True)
class Trees:
    """Trees as arrays over their nodes; the children of a leaf are itself."""

    roots: NDArray[np.int32]
    children: NDArray[np.int32]
    """[nodes, 2]: the nodes for values up to the threshold, and above it."""
    columns: NDArray[np.int32]
    thresholds: NDArray[np.float64]
    values: NDArray[np.float32]

    @classmethod
    def fit(cls, matrix: Array, values: Array, count: int, seed: int, **settings: Any) -> Self:
        """Grow trees to values [n] of features [n, features], with settings of `ExtraTreesRegressor`."""
        from sklearn.ensemble import ExtraTreesRegressor  # noqa: PLC0415 - reading a checkpoint needs no scikit-learn

        forest = ExtraTreesRegressor(count, random_state=seed, **settings)
        forest.fit(matrix.astype(np.float32), values)
        trees = [item.tree_ for item in forest.estimators_]
        starts = np.cumsum([0, *(tree.node_count for tree in trees)])
        return cls(
            roots=starts[:-1].astype(np.int32),
            children=np.concatenate([_children(tree) + start for tree, start in zip(trees, starts, strict=False)]),
            columns=np.concatenate([np.maximum(tree.feature, 0) for tree in trees]).astype(np.int32),
            thresholds=np.concatenate([tree.threshold for tree in trees]),
            values=np.concatenate([tree.value[:, 0, 0] for tree in trees]).astype(np.float32),
        )

    def predict(self, matrix: Array) -> NDArray[np.float32]:
        """Return [n, trees]: the value of each tree."""
        rows = np.arange(len(matrix))[:, None]
        columns = matrix.astype(np.float32)
        nodes = np.broadcast_to(self.roots, (len(matrix), len(self.roots)))
        while True:
            above = columns[rows, self.columns[nodes]] > self.thresholds[nodes]
            following = self.children[nodes, above.astype(np.int8)]
            if np.array_equal(following, nodes):
                return self.values[nodes]
            nodes = following

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
