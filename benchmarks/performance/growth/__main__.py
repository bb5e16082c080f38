"""`python -m benchmarks.performance.growth`: measure, and write docs/growth.md and docs/growth.png."""

import argparse
from pathlib import Path

import pandas as pd

from benchmarks.performance.growth.measuring import measure_all
from benchmarks.performance.growth.page import render
from benchmarks.performance.growth.pictures import draw_growth


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance.growth", description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--results", type=Path, default=Path("runs/growth.csv"), help="the figures of the last run")
    parser.add_argument("--draw", action="store_true", help="draw the figures of the last run without measuring")
    arguments = parser.parse_args()
    arguments.docs.mkdir(parents=True, exist_ok=True)
    table = pd.read_csv(arguments.results) if arguments.draw else measure_all(arguments.results)
    (arguments.docs / "growth.md").write_text(render(table), encoding="utf-8")
    draw_growth(table, arguments.docs / "growth.png")
    print(f"growth.md and growth.png are in {arguments.docs}")


if __name__ == "__main__":
    main()
