"""Arithmetic written as data: bounds of factors, conditions of the shape specification.

An expression comes from a configuration file, so it can name values and call the functions listed here, and nothing else.
"""

import ast
import math
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType
from typing import Any

from dataset_builder.errors import UserError

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
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_MAX_LENGTH = 500
_MAX_POWER = 64


@cache
def parse(text: str) -> CodeType:
    """Compile an expression after checking that it is arithmetic and nothing more."""
    if len(text) > _MAX_LENGTH:
        raise UserError(f"expected an expression of at most {_MAX_LENGTH} characters, found {len(text)}: shorten it")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError) as error:
        raise UserError(f"expected an expression such as 'max(2, width // 4)', found {text!r}: {error}") from error
    for node in ast.walk(tree):
        _check(node, text)
    return compile(tree, "<expression>", "eval")


def _check(node: ast.AST, text: str) -> None:
    if not isinstance(node, _ALLOWED):
        raise UserError(f"expected arithmetic in {text!r}, found {type(node).__name__}: use numbers, names and {sorted(FUNCTIONS)}")
    if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
        raise UserError(f"expected a plain function in {text!r}: use one of {sorted(FUNCTIONS)}")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        # a ** b ** c would let a configuration file hang the process
        power = node.right.value if isinstance(node.right, ast.Constant) else None
        if not isinstance(power, int | float) or abs(power) > _MAX_POWER:
            raise UserError(f"expected a constant exponent of at most {_MAX_POWER} in {text!r}: write it as a number")


def names(text: str) -> frozenset[str]:
    """The names that an expression reads, functions left out."""
    parse(text)
    return frozenset(node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)) - FUNCTIONS.keys()


def scope(values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> dict[str, Any]:
    """What expressions are evaluated in; `functions` adds to the ones that every expression may call."""
    return {"__builtins__": {}, **FUNCTIONS, **(functions or {}), **values}


def evaluate(text: str, names_and_values: dict[str, Any]) -> Any:
    """The value of an expression in a scope."""
    try:
        return eval(parse(text), names_and_values)  # noqa: S307 - parse() let only arithmetic through
    except (ArithmeticError, IndexError, NameError, TypeError, ValueError) as error:
        raise UserError(f"expected {text!r} to have a value, found {type(error).__name__}: {error}") from error
