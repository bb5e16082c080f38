"""Environments with the libraries of published runs, made once below `.venvs`: `python -m benchmarks.published.stacks`.

A stack has the pinned releases of `releases/NAME.txt` and finds everything else, torch included, in the running
interpreter's own libraries. Releases are installed without their dependencies, so that none replaces torch.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from vramcast.errors import UserError

_LISTS = Path(__file__).resolve().parent / "releases"
ROOT = Path(".venvs")
SHARED = "shared"
_DONE = "complete"


def names() -> list[str]:
    """Return the names of all stacks, the one that the others need first."""
    listed = sorted(path.stem for path in _LISTS.glob("*.txt"))
    return sorted(listed, key=lambda name: name != SHARED)


def interpreter(name: str, root: Path = ROOT) -> Path:
    """Return the interpreter of a stack."""
    python = root / name / "bin" / "python"
    if not (root / name / _DONE).exists():
        raise UserError(f"expected the stack {name} in {root}, found none: run make stacks")
    return python.absolute()


def releases(name: str) -> list[str]:
    """Return the pinned releases of a stack."""
    lines = (_LISTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def make(name: str, root: Path = ROOT) -> bool:
    """Create a stack and return True; return False if it was complete."""
    home = root / name
    if (home / _DONE).exists():
        return False
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    libraries = [item for item in sys.path if Path(item).name in ("site-packages", "dist-packages")]
    below = [] if name == SHARED else [str(_libraries(root / SHARED))]
    (_libraries(home) / "libraries.pth").write_text("\n".join([*below, *libraries]) + "\n", encoding="utf-8")
    words = ["--quiet", "--no-deps", "--ignore-installed", *releases(name)]
    subprocess.run([sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", *words], check=True)
    (home / _DONE).touch()
    return True


def _libraries(home: Path) -> Path:
    return next(home.absolute().glob("lib/python*/site-packages"))


def main() -> None:
    """Create the stacks that are missing."""
    wanted = names()
    for place, name in enumerate(wanted, 1):
        print(f"{place}/{len(wanted)} {name}: {', '.join(releases(name))}", flush=True)
        print("    created" if make(name) else "    complete", flush=True)


if __name__ == "__main__":
    main()
