"""The language of the code: error messages, docstrings, comments and names.

Style guides are hard to check; these tests cover what a program can see. Errors that a user meets are one sentence:
"expected X, found Y: do Z". Docstrings of functions start with a verb, and some words are never used.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("virtual_gpu", "device", "jobs", "simulation", "dataset_builder", "models", "train", "collocation")
ERRORS = {"UserError", "UntraceableError", "Refused"}
FOREIGN = object()
"""Stands for a message that is made elsewhere: by a child process, a service, or a function."""

CHECKED = (*PACKAGES, "vramcast", "benchmarks")
NOT_YET: tuple[str, ...] = ()
"""Paths that do not follow the rules for docstrings, comments and names yet."""
NOT_A_VERB = re.compile(
    "A|All|An|And|As|At|Both|But|By|Each|Every|For|From|How|In|It|Its|No|None|Not|Of|On|One|So|Some|That|The|This|Those|"
    "Two|What|Where|Whether|Which|While|Who|Whole|With|Without"
)
ENDING_IN_S = {"Pass", "Process", "Express", "Address", "Compress", "Discuss", "Suppress", "Guess", "Access"}
FORBIDDEN_WORDS = re.compile(
    r"\b([Mm]end(?:s|ed|ing)?|[Ee]ndless\w*|without end|[Ss]aid|[Tt]old|he|his|him|taken up|goes on|[Cc]ards?)\b"
)
OTHER_CARDS = (
    "train/card.py",
    "train/tasks/fit.py",
    "models/checkpoint.py",
    "jobs/families/external.py",
)
"""Files in which a card is the README of a checkpoint, or the name of a factor that ids depend on."""
SHARED_CLASS_NAMES: set[str] = set()
"""Names that two classes share and should not."""
VAGUE_NAMES = {"found", "said", "told", "kept", "asked", "given", "known"}


def _files(packages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield names and contents of the Python files below the packages, without links."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield str(path.relative_to(ROOT)), path.read_text()


CHECKED_FILES = dict(item for item in _files(CHECKED) if not item[0].startswith(NOT_YET))


# --- error messages --------------------------------------------------------------------------------------------------


def _template(node: ast.expr) -> str | object:
    """Return the text of an expression, with {} for inserted values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if isinstance(item, ast.FormattedValue) else str(item.value) for item in node.values)
    return FOREIGN


def _messages() -> Iterator[tuple[str, str]]:
    for name, text in _files(PACKAGES):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                template = _template(node.args[-1])
                if isinstance(template, str):
                    yield f"{name}:{node.lineno}", template


def _message_fault(message: str) -> str | None:
    expected, separator, rest = message.partition(" found")
    if not expected.startswith("expected ") or not separator:
        return "does not say what was expected and what was found"
    if not re.search(r"[:;,] \S", rest.removeprefix(":").lstrip()):
        return "does not say how to fix it"
    return None


def test_error_messages_say_what_was_expected_what_was_found_and_how_to_fix_it():
    messages = dict(_messages())
    assert len(messages) > 300
    assert {place: text for place, text in messages.items() if _message_fault(text)} == {}


@pytest.mark.parametrize(
    "message", ["no such file", "expected a file, found none", "expected a file: name one", "expected a, found: {}"]
)
def test_incomplete_messages_are_recognised(message):
    assert _message_fault(message)


# --- docstrings, comments and names ----------------------------------------------------------------------------------


def _docstring_fault(docstring: str) -> str | None:
    match = re.match(r"([A-Z]\w*)\b", docstring)
    if not match:
        return "does not start with a capitalised verb"
    word = match[1]
    third_person = word.endswith("s") and word not in ENDING_IN_S
    if NOT_A_VERB.fullmatch(word) or third_person or word.endswith("ing"):
        return f"starts with {word!r}, which is not an imperative"
    return None


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {item.id if isinstance(item, ast.Name) else getattr(item, "attr", "") for item in node.decorator_list}
    return bool(names & {"property", "cached_property", "fixture"})


def _docstring_faults(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node):
            docstring = ast.get_docstring(node)
            if docstring and (fault := _docstring_fault(docstring)):
                yield node.lineno, f"{fault}: {docstring.splitlines()[0]}"


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments and string literals with their lines."""
    literals = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in literals:
            yield token.start[0], token.string


def _word_faults(name: str, text: str) -> Iterator[tuple[int, str]]:
    for line, prose in _prose(text):
        for match in FORBIDDEN_WORDS.finditer(prose):
            if not (match[0].lower().startswith("card") and name in OTHER_CARDS):
                yield line, f"{match[0]!r} in {prose.strip()[:100]}"


def _name_faults(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else getattr(node, "arg", None)
        if name in VAGUE_NAMES and not isinstance(node, ast.keyword):
            yield node.lineno, f"the name {name!r} says nothing about its value"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CHECKED_FILES)
def test_docstrings_start_with_a_verb_and_words_are_plain(name):
    text = CHECKED_FILES[name]
    faults = [*_docstring_faults(text), *_word_faults(name, text), *_name_faults(text)]
    assert [f"{name}:{line}: {fault}" for line, fault in faults] == []


def test_two_classes_never_share_a_name():
    names = Counter(
        node.name
        for _, text in _files(PACKAGES)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} <= SHARED_CLASS_NAMES


@pytest.mark.parametrize("docstring", ["The sum.", "Returns it.", "whether it fits", "What it takes.", "[n]: sums"])
def test_docstrings_without_an_imperative_are_recognised(docstring):
    assert _docstring_fault(docstring)


@pytest.mark.parametrize("docstring", ["Return the sum.", "Pass it on.", "Trace a step."])
def test_docstrings_with_an_imperative_pass(docstring):
    assert _docstring_fault(docstring) is None
