"""`python -m benchmarks.performance [NAME ...]`: run measurements, and write what they print into the pages.

A page that shows the output of a measurement has marks for it. The output of others is printed alone.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.page import is_marked, write_part

MAKER = "performance"
MEASUREMENTS = (
    "build_rate", "mix_rate", "trace_speed", "run_cost", "long_runs", "cold_start", "inference", "rank_tracker",
    "simulator_scale", "service_load", "run_phases", "history_look_ups", "table_speed",
)  # fmt: skip
"""Modules of this package; `growth` writes a page of its own."""
_HERE = Path(__file__).parent
PAGES = (_HERE / "README.md", _HERE.parents[1] / "docs" / "virtual-gpu.md")


def output_of(name: str) -> str:
    """Run a measurement in a process of its own, and return what it prints."""
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.performance.{name}"]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise SystemExit(f"expected {name} to end with code 0, found {process.returncode}: see its messages")
    return "".join(lines)


def publish(names: Sequence[str], pages: Sequence[Path], run: Callable[[str], str] = output_of) -> None:
    """Run measurements, and write the output of each into the pages that have its marks."""
    for name in names:
        text = run(name).strip("\n")
        if any(is_marked(page, MAKER, name) for page in pages):
            write_part(pages, MAKER, name, text if text.startswith("|") else f"```\n{text}\n```")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(MEASUREMENTS)}; default: all")
    names = parser.parse_args().names
    if unknown := set(names) - set(MEASUREMENTS):
        parser.error(f"expected names of measurements, found {', '.join(sorted(unknown))}: see --help")
    publish(names or MEASUREMENTS, PAGES)


if __name__ == "__main__":
    main()
