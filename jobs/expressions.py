"""Arithmetic expressions in configuration files: bounds of factors, conditions of the shape specification.

They come from configuration files, so they can only use values by name and the functions listed here.
"""

import ast
import math
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType
from typing import Any

from vramcast.errors import UserError

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "all": all,
    "ceil": math.ceil,
    "floor": math.floor,
    "int": int,
    "len": len,
    "log2": math.log2,
    "max": max,
    "min": min,
    "prod": math.prod,
    "round": round,
    "sqrt": math.sqrt,
    "zip": zip,
}

_ALLOWED = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Store, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare,
    ast.IfExp, ast.Call, ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.Starred,
    ast.GeneratorExp, ast.comprehension,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.UAdd, ast.USub, ast.Not,
    ast.boolop, ast.cmpop,
)  # fmt: skip
_MAX_LENGTH = 500
_MAX_POWER = 64


@cache
def parse(text: str) -> CodeType:
    """Compile an expression after checking that it contains only arithmetic."""
    if len(text) > _MAX_LENGTH:
        raise UserError(f"expected an expression of at most {_MAX_LENGTH} characters, found {len(text)}: shorten it")
    try:
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            _check(node, text)
        return compile(tree, "<expression>", "eval")
    except UserError:
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two: too deeply nested
        raise UserError(
            f"expected an expression such as 'max(2, width // 4)', found {text!r} ({error}): fix it"
        ) from error


def _check(node: ast.AST, text: str) -> None:
    if not isinstance(node, _ALLOWED):
        raise UserError(
            f"expected arithmetic in {text!r}, found {type(node).__name__}: use numbers, names and {sorted(FUNCTIONS)}"
        )
    if isinstance(node, ast.Constant) and not isinstance(node.value, int | float | str | None):
        raise UserError(f"expected numbers or strings in {text!r}, found {node.value!r}: use one of them")
    if isinstance(node, ast.Name) and node.id.startswith("_"):
        raise UserError(f"expected a plain name in {text!r}, found {node.id!r}: use names without leading underscores")
    if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
        raise UserError(
            f"expected a plain function in {text!r}, found {ast.unparse(node.func)!r}: use one of {sorted(FUNCTIONS)}"
        )
    if isinstance(node, ast.comprehension) and (
        node.is_async or any(isinstance(part, ast.Subscript) for part in ast.walk(node.target))
    ):
        raise UserError(
            f"expected 'for NAME in ...' in {text!r}, found {ast.unparse(node).strip()!r}: write it like that"
        )
    if isinstance(node, ast.BinOp):
        _check_operation(node, text)


def _check_operation(node: ast.BinOp, text: str) -> None:
    """Reject arithmetic on sequences and a ** b ** c, with which a configuration file could hang the process."""
    for side in (node.left, node.right):
        if isinstance(side, ast.List | ast.Tuple) or (
            isinstance(side, ast.Constant) and not isinstance(side.value, int | float)
        ):
            raise UserError(
                f"expected arithmetic on numbers in {text!r}, found {ast.unparse(side)}: use numbers and names"
            )
    if not isinstance(node.op, ast.Pow):
        return
    exponent = node.right.operand if isinstance(node.right, ast.UnaryOp) else node.right
    if not (
        isinstance(exponent, ast.Constant) and isinstance(exponent.value, int | float) and exponent.value <= _MAX_POWER
    ):
        raise UserError(
            f"expected a constant exponent of at most {_MAX_POWER} in {text!r}, found {ast.unparse(node.right)!r}: "
            "write it as a number"
        )
    if any(isinstance(part, ast.Pow) for part in ast.walk(node.left)):
        raise UserError(
            f"expected no power of a power in {text!r}, found {ast.unparse(node)!r}: multiply the exponents"
        )


def names(text: str) -> frozenset[str]:
    """Return the names that an expression reads from its scope, without functions."""
    parse(text)
    nodes = [node for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)]
    bound = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}  # x of 'all(x > 0 for x in S)'
    return frozenset(node.id for node in nodes) - bound - FUNCTIONS.keys()


def scope(values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> dict[str, Any]:
    """Return a scope for `evaluate`; `functions` are available in addition to `FUNCTIONS`."""
    return {"__builtins__": {}, **FUNCTIONS, **(functions or {}), **values}


def evaluate(text: str, names_and_values: dict[str, Any]) -> Any:
    """Evaluate an expression in a scope."""
    code = parse(text)
    names_and_values.setdefault("__builtins__", {})  # otherwise eval() adds all builtins
    try:
        return eval(code, names_and_values)  # noqa: S307 - parse() accepts only arithmetic
    except (ArithmeticError, LookupError, MemoryError, NameError, TypeError, ValueError) as error:
        raise UserError(f"expected {text!r} to have a value, found {type(error).__name__} ({error}): fix it") from error
