"""Pages of the documentation, as tests read them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str = "") -> list[str]:
    """The blocks of code that are marked as of a language."""
    return [code for marked, code in _BLOCK.findall(page.read_text()) if marked == language]


def prose(page: Path) -> str:
    """What stands between the blocks."""
    return _BLOCK.sub("", page.read_text())
