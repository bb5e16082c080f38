"""Writes generated tables into documentation pages, between two marks that name the command."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

_MARK = "<!-- made by benchmarks.{}: {} -->"


def write_part(page: Path, maker: str, name: str, text: str) -> None:
    """Replace the text between the marks of a part."""
    before, start, rest = page.read_text(encoding="utf-8").partition(_MARK.format(maker, name))
    _, end, after = rest.partition(_MARK.format(maker, f"end of {name}"))
    if not (start and end):
        raise SystemExit(f"expected the marks of {name!r} by {maker} in {page}, found none: add them")
    page.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


def study_parser(description: str | None, measured: bool = True) -> ArgumentParser:
    """Return a parser with the options of all studies: the measurements, if any, and the outputs."""
    parser = ArgumentParser(description=description)
    if measured:
        parser.add_argument("--data", required=True, help="the directory with the public tables")
    parser.add_argument("--page", type=Path, help="write the tables into the marked parts of this page")
    parser.add_argument("--picture", type=Path)
    return parser


def publish(places: Namespace, maker: str, text: str, draw: Callable[[Path], None]) -> None:
    """Print a table; write it and its picture where the options of `study_parser` say."""
    print(text)
    if places.page:
        write_part(places.page, maker, "table", text)
    if places.picture:
        draw(places.picture)
