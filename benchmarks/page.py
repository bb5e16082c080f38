"""Writes generated tables into documentation pages, between two marks that name the command."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

_MARK = "<!-- made by benchmarks.{}: {} -->"


def is_marked(page: Path, maker: str, name: str) -> bool:
    """Return whether a page has the marks of a part."""
    text = page.read_text(encoding="utf-8")
    return all(_MARK.format(maker, mark) in text for mark in (name, f"end of {name}"))


def write_part(pages: Path | Sequence[Path], maker: str, name: str, text: str) -> None:
    """Replace the text between the marks of a part, in each page that has them."""
    pages = [pages] if isinstance(pages, Path) else pages
    marked = [page for page in pages if is_marked(page, maker, name)]
    if not marked:
        names = " and ".join(map(str, pages))
        raise SystemExit(f"expected the marks of {name!r} by {maker} in {names}, found none: add them")
    for page in marked:
        before, start, rest = page.read_text(encoding="utf-8").partition(_MARK.format(maker, name))
        _, end, after = rest.partition(_MARK.format(maker, f"end of {name}"))
        page.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


def study_parser(description: str | None, measured: bool = True) -> ArgumentParser:
    """Return a parser with the options of all studies: the measurements, if any, and the outputs."""
    parser = ArgumentParser(description=description)
    if measured:
        parser.add_argument("--data", required=True, help="the directory with the public tables")
    parser.add_argument("--page", type=Path, help="write the tables into the marked parts of this page")
    parser.add_argument("--picture", type=Path)
    return parser


def show(page: Path | None, maker: str, name: str, text: str) -> None:
    """Print a table, and write it into its part of a page, if one is named."""
    print(text, flush=True)
    if page:
        write_part(page, maker, name, text)


def publish(places: Namespace, maker: str, text: str, draw: Callable[[Path], None]) -> None:
    """Show a table, and draw its picture, where the options of `study_parser` say."""
    show(places.page, maker, "table", text)
    if places.picture:
        draw(places.picture)
