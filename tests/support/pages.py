"""Code blocks and prose of the documentation."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str = "") -> list[str]:
    """Return the code blocks of a language."""
    return [code for marked, code in _BLOCK.findall(page.read_text()) if marked == language]


def prose(page: Path) -> str:
    """Return the text between code blocks."""
    return _BLOCK.sub("", page.read_text())
