"""Expressions in configuration files: arithmetic works, everything else raises one sentence."""

from contextlib import suppress
from typing import Any

import pytest

from vramcast.errors import UserError
from vramcast.jobs import expressions


def value_of(text: str, **values: Any) -> Any:
    return expressions.evaluate(text, expressions.scope(values))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("7 // 2, 7 % 2, 7 / 2", (3, 1, 3.5)),
        ("-7 + +2", -5),
        ("2 ** 10", 1024),
        ("2 ** -1", 0.5),
        ("16 ** 0.5", 4.0),
        ("max(2, width // 4)", 16),
        ("min(2, width), abs(-3), round(2.6), int(2.9)", (2, 3, 3, 2)),
        ("ceil(2.1), floor(2.9), log2(8), sqrt(9)", (3, 2, 3.0, 3.0)),
        ("width if width > 100 else 100", 100),
        ("not width == 64 or width in (1, 2)", False),
        ("1 <= width < 65 and width != 63", True),
        ("kind == 'max'", True),
        ("nothing is None", True),
        ("sizes[0] + sizes[-1]", 5),
        ("sizes[::-1]", (3, 4, 2)),
        ("(1, *sizes)", (1, 2, 4, 3)),
        ("max(*sizes)", 4),
        ("prod(sizes), len(sizes)", (24, 3)),
        ("all(x > 1 for x in sizes if x != 3)", True),
        ("all(x == y for x, y in zip(sizes, sizes[::-1]))", False),
    ],
)
def test_arithmetic_has_a_value(text: str, expected: Any) -> None:
    assert value_of(text, width=64, sizes=(2, 4, 3), kind="max", nothing=None) == expected


@pytest.mark.parametrize(
    "text",
    [
        "width.real",
        "().__class__",
        "''.join(sizes)",
        "lambda: 1",
        "(lambda: 1)()",
        "import os",
        "__import__('os')",
        "__builtins__",
        "_private",
        "sizes[0](1)",
        "'abs'(1)",
        "(abs or max)(1)",
        "f'{width}'",
        "(x := 3)",
        "[x for x in sizes]",
        "{1, 2}",
        "{'a': 1}",
        "all(1 for sizes[0] in sizes)",
        "all(1 for (x, sizes[0]) in sizes)",
        "all(x async for x in sizes)",
        "max(1, 2, key=abs)",
        "await width",
        "yield width",
        "width; width",
        "width = 3",
        "*sizes",
        "b'bytes'",
        "1j",
        "...",
        "~width",
        "width @ width",
        "",
        "1 +",
        "\0",
        "\ud800",
    ],
)
def test_everything_but_arithmetic_is_rejected(text: str) -> None:
    with pytest.raises(UserError):
        expressions.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "9 ** 65",
        "9 ** width",
        "9 ** 9 ** 9",
        "(9 ** 64) ** 64",
        "(1 + 9 ** 64) ** 64",
        "2 ** 'a'",
        "1 << 10",
        "1 << 10 ** 20",
        "[0] * 10 ** 12",
        "(0,) * 10 ** 12",
        "'a' * 10 ** 12",
        "10 ** 12 * 'a'",
        "'%1000000000d' % 1",
        "+".join(["1"] * 300),
        "(" * 300,
        "(" * 240 + "1" + ")" * 240,
    ],
)
def test_expressions_that_could_hang_the_process_are_rejected(text: str) -> None:
    with pytest.raises(UserError):
        expressions.parse(text)


def test_deep_nesting_gives_a_value_or_a_user_error() -> None:
    with suppress(UserError):
        assert value_of("-" * 498 + "1") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1 // 0", "ZeroDivisionError"),
        ("int(1e308 * 10)", "OverflowError"),
        ("absent + 1", "'absent' is not defined"),
        ("open('file')", "'open' is not defined"),
        ("eval('1')", "'eval' is not defined"),
        ("sizes[9]", "IndexError"),
        ("table['missing']", "KeyError"),
        ("len(3)", "TypeError"),
        ("1 + sizes", "TypeError"),
        ("sqrt(-1)", "ValueError"),
        ("max(())", "ValueError"),
        ("log2(0)", "ValueError"),
    ],
)
def test_errors_of_evaluation_raise_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        value_of(text, sizes=(2, 4, 3), table={})
    assert repr(text) in str(caught.value)


def test_a_plain_dict_as_scope_has_no_builtins() -> None:
    with pytest.raises(UserError, match="'open' is not defined"):
        expressions.evaluate("open('file')", {})


def test_errors_name_the_expression_and_the_fix() -> None:
    with pytest.raises(
        UserError, match=r"expected arithmetic in 'width\.real', found Attribute: use numbers, names and \['abs'"
    ):
        expressions.parse("width.real")
    with pytest.raises(UserError, match="at most 500 characters, found 501: shorten it"):
        expressions.parse("1" * 501)
    with pytest.raises(UserError, match=r"such as 'max\(2, width // 4\)', found '1 \+'"):
        expressions.parse("1 +")


def test_a_scope_can_add_functions() -> None:
    scope = expressions.scope({"x": 2}, {"double": lambda x: 2 * x})
    assert expressions.evaluate("double(x) + max(x, 1)", scope) == 6


def test_values_take_precedence_over_functions() -> None:
    assert value_of("max + 1", max=2) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2", set()),
        ("max(2, width // 4) + depth", {"width", "depth"}),
        ("all(x == length for x in sizes)", {"length", "sizes"}),
        ("kind == 'width'", {"kind"}),
        ("unknown(1)", {"unknown"}),
    ],
)
def test_names_returns_the_names_that_are_read(text: str, expected: set[str]) -> None:
    assert expressions.names(text) == expected


def test_names_rejects_what_parse_rejects() -> None:
    with pytest.raises(UserError):
        expressions.names("width.real")
