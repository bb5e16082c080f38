"""Tables that are made, in pages that are written: each between two marks that say who makes it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

_MARK = "<!-- made by benchmarks.{}: {} -->"


def write_part(page: Path, maker: str, name: str, text: str) -> None:
    """Put a part between its marks."""
    before, found, rest = page.read_text(encoding="utf-8").partition(_MARK.format(maker, name))
    _, end, after = rest.partition(_MARK.format(maker, f"end of {name}"))
    if not (found and end):
        raise SystemExit(f"expected the marks of {name!r} by {maker} in {page}, found none: add them")
    page.write_text(f"{before}{found}\n{text}\n{end}{after}", encoding="utf-8")


def add_places(parser: ArgumentParser) -> None:
    """Options for where tables and a picture of them go."""
    parser.add_argument("--page", type=Path, help="write tables into their marked parts of a page")
    parser.add_argument("--picture", type=Path)


def publish(places: Namespace, maker: str, text: str, draw: Callable[[Path], None]) -> None:
    """Print what has one table, and put it and its picture where `add_places` was told to."""
    print(text)
    if places.page:
        write_part(places.page, maker, "table", text)
    if places.picture:
        draw(places.picture)
