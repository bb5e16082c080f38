"""The pages for people, as files: plain HTML, CSS and JavaScript without a build step."""

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

_DIRECTORY = Path(__file__).parent
_TYPES: Mapping[str, str] = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = ("style.css", "logic.js", "shared.js", "estimate.js", "operations.js")
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""No script or style but the files here, nothing from elsewhere, and no frame around a page."""
router = APIRouter(include_in_schema=False)


def _file(name: str) -> Response:
    path = _DIRECTORY / name
    return Response(path.read_bytes(), media_type=f"{_TYPES[path.suffix]}; charset=utf-8", headers=dict(HEADERS))


@router.get("/")
async def estimate() -> Response:
    """Return the page on which people describe a job."""
    return _file("index.html")


@router.get("/operations")
async def operations() -> Response:
    """Return the page of operators; its figures need the token."""
    return _file("operations.html")


@router.get("/pages/{name}")
async def part(name: str) -> Response:
    """Return a script or the style of the pages."""
    if name not in FILES:
        return PlainTextResponse("not found", 404)
    return _file(name)
