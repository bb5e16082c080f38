"""Every error that a user meets is one sentence: what was expected, what was found, and how to mend it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ERRORS = {"UserError", "UntraceableError", "Refused"}
FOREIGN = object()
"""A sentence that comes from another place: what a child or a service said, or what a function makes of an error."""


def _template(node: ast.expr) -> str | object:
    """The text of an expression, with {} for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if isinstance(item, ast.FormattedValue) else str(item.value) for item in node.values)
    return FOREIGN


def _sentences() -> Iterator[tuple[str, str]]:
    paths = (
        path for name in ("dataset_builder", "models", "train", "collocation") for path in (ROOT / name).rglob("*.py")
    )
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                found = _template(node.args[-1])
                if isinstance(found, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", found


def _fault(sentence: str) -> str | None:
    expected, found, rest = sentence.partition(" found")
    if not expected.startswith("expected ") or not found:
        return "does not say what was expected and what was found"
    if not re.search(r"[:;,] \S", rest.removeprefix(":").lstrip()):
        return "does not say how to mend it"
    return None


def test_every_sentence_says_how_to_mend_what_it_tells():
    sentences = dict(_sentences())
    assert len(sentences) > 300
    assert {place: text for place, text in sentences.items() if _fault(text)} == {}


@pytest.mark.parametrize(
    "sentence", ["no such file", "expected a file, found none", "expected a file: name one", "expected a, found: {}"]
)
def test_a_sentence_that_falls_short_is_told(sentence):
    assert _fault(sentence)
