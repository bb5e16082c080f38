"""Tables that are made, in pages that are written: each between two marks that say who makes it."""

from pathlib import Path

_MARK = "<!-- made by benchmarks.{}: {} -->"


def write_part(page: Path, maker: str, name: str, text: str) -> None:
    """Put a part between its marks."""
    before, found, rest = page.read_text(encoding="utf-8").partition(_MARK.format(maker, name))
    _, end, after = rest.partition(_MARK.format(maker, f"end of {name}"))
    if not (found and end):
        raise SystemExit(f"expected the marks of {name!r} by {maker} in {page}, found none: add them")
    page.write_text(f"{before}{found}\n{text}\n{end}{after}", encoding="utf-8")
