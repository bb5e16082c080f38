"""Finds attention in an ONNX graph, which writes it as two products with a softmax between them.

torch trains with one fused kernel for them, `scaled_dot_product_attention`, which never keeps the matrix of scores.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_AROUND = frozenset({"Add", "Mul", "Div", "Where", "Cast", "Identity", "Dropout", "Reshape"})
"""Operations between products and softmax: the scale, the mask, dropout, and conversions of types."""
_LONGEST = 8


def fused_attention(nodes: Sequence[Any], constants: frozenset[str]) -> tuple[Mapping[str, Sequence[str]], set[str]]:
    """Return the inputs of each attention by the output of its last product, and the outputs that it replaces.

    `constants` are names that no operation on data writes.
    """
    maker = {name: node for node in nodes for name in node.output if name}
    uses = Counter(name for node in nodes for name in node.input)
    readers: dict[str, Any] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, node)
    attention: dict[str, Sequence[str]] = {}
    replaced: set[str] = set()
    for node in nodes:
        if node.op_type != "Softmax" or not node.input:
            continue
        above = _scores(node.input[0], maker, constants)
        below = _product(node.output[0], readers, uses)
        if above and below:
            scores, product = above[-1], below[-1]
            inside = [item.output[0] for item in (*above, node, *below[:-1])]
            values = [name for name in product.input if name not in inside]
            sides = [_unscaled(name, maker, constants, replaced) for name in scores.input[:2]]
            attention[product.output[0]] = [*sides, *values]
            replaced.update(inside)
    return attention, replaced


def _scores(name: str, maker: Mapping[str, Any], constants: frozenset[str]) -> list[Any]:
    """Return the operations upwards to the product of queries and keys, which is the last; none if there is none."""
    passed: list[Any] = []
    while len(passed) < _LONGEST and (node := maker.get(name)) is not None:
        passed.append(node)
        if node.op_type == "MatMul":
            return passed
        data = [item for item in node.input if item in maker and item not in constants]
        if node.op_type not in _AROUND or not data:
            return []
        name = next((item for item in data if maker[item].op_type in {"MatMul", *_AROUND}), data[0])
    return []


def _product(name: str, readers: Mapping[str, Any], uses: Mapping[str, int]) -> list[Any]:
    """Return the operations downwards to the product with the values, which is the last; none if there is none."""
    passed: list[Any] = []
    while len(passed) < _LONGEST and uses[name] == 1:
        node = readers[name]
        passed.append(node)
        if node.op_type == "MatMul":
            return passed
        if node.op_type not in _AROUND or not node.output:
            return []
        name = node.output[0]
    return []


def _unscaled(name: str, maker: Mapping[str, Any], constants: frozenset[str], replaced: set[str]) -> str:
    """Return queries or keys before a constant scales them."""
    node = maker.get(name)
    if node is None or node.op_type not in ("Mul", "Div"):
        return name
    data = [item for item in node.input if item in maker and item not in constants]
    if len(data) != 1:
        return name
    replaced.add(name)
    return str(data[0])
