"""Write the tables of docs/virtual-gpu.md: `python -m benchmarks.virtual_gpu --data DIR --page docs/virtual-gpu.md`.

Measured rows of the public tables, which `vramcast evaluate --backend virtual` estimates without learning.
Simulations come from the user's cache.
"""

import contextlib
import io
import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import write_part
from vramcast.commands import evaluate_command

MAKER = "virtual_gpu"
Report = dict[str, Any]
Evaluate = Callable[[str, tuple[str, ...]], Report]


@dataclass(frozen=True)
class Table:
    """A public table, evaluated by one command."""

    file: str
    options: tuple[str, ...]
    lines: tuple[tuple[str, str, str], ...]
    """Titles of lines, and where the command's report has their figures: a mapping of it, and a key of that."""


def _whole(file: str, title: str, *options: str) -> Table:
    return Table(file, options, ((title, "", ""),))


MEASURED = (
    _whole("mlp_data_step1.csv", "MLP, step 1", "--bucket-mib", "1000"),
    _whole("mlp_data_step2.csv", "MLP, step 2", "--bucket-mib", "1000"),
    _whole("transformer_data_sample.csv", "Transformer sample", "--bucket-mib", "8000"),
    _whole("cnn_data_step1.csv", "CNN, all seven shapes", "--bucket-mib", "8000"),
    _whole("timm_sgd_a100.csv", "timm, usable rows, `--half odd`", "--bucket-mib", "8000", "--half", "odd"),
    _whole("timm_sgd_a100.csv", "timm, all usable rows", "--bucket-mib", "8000"),
    Table(
        "unseen_models_a100.csv",
        ("--bucket-mib", "1024"),
        (
            ("real networks, 2024", "by_stack", "a100_40gb_gpumemnet_2024 2024"),
            ("real networks, 2025", "by_stack", "a100_40gb 2025"),
            ("real networks, 2026", "by_stack", "a100_40gb 2026"),
            ("real networks, RTX 2080 Ti (profile not calibrated)", "by_stack", "rtx_2080ti 2026"),
        ),
    ),
)
HEAD = "| rows | n | median error | mean | p95 | too low | bucket accuracy | OOM rows found | false alarms |"


def measured_lines(evaluate: Evaluate) -> Iterator[str]:
    """Yield the table of GPUMemNet's and the real networks."""
    yield HEAD
    yield "| --- " * (HEAD.count("|") - 1) + "|"
    for table in MEASURED:
        report = evaluate(table.file, table.options)
        for title, mapping, key in table.lines:
            part = report[mapping][key] if mapping else report
            errors = [f"{100 * part['median_relative_error']:.2f} %"]
            errors += [_percent(part[name]) for name in ("mean_relative_error", "p95_relative_error", "point_too_low")]
            accuracy = f"{_percent(part['accuracy'])} at {report['bucket_mib']} MiB"
            ends = [_percent(part["oom_recall"]), _percent(part["oom_false_alarms"])]
            yield f"| {' | '.join([title, format(part['rows'], ','), *errors, accuracy, *ends])} |"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def evaluation(data: Path) -> Evaluate:
    """Return a function that runs `vramcast evaluate` on a table below a directory, and reads its JSON."""

    def evaluate(file: str, options: tuple[str, ...]) -> Report:
        (path,) = sorted(data.rglob(file))
        words = ["--backend", "virtual", "--data", str(path), *options, "--json"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if evaluate_command.main(words):
                raise SystemExit(f"expected figures of {path}, found none: see the message above")
        report: Report = json.loads(printed.getvalue())
        return report

    return evaluate


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the directory with the public tables")
    parser.add_argument("--page", type=Path, help="write the table into the marked part of this page")
    arguments = parser.parse_args()
    text = "\n".join(measured_lines(evaluation(arguments.data)))
    print(text)
    if arguments.page:
        write_part(arguments.page, MAKER, "measured", text)


if __name__ == "__main__":
    main()
