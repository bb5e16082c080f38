"""Compare the peaks of runs that end loops early with whole runs: `python -m benchmarks.performance.run_phases`.

Each script of `tests/scripts` runs twice, with `--phases auto` and to its own end. The peaks agree within 1 %, or the
report names a phase that is missing. Scripts whose libraries are absent are named as such.
"""

import argparse
import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from vramcast.device.profiles import load_profile
from vramcast.simulation.scripts.client import RunOptions, run_script
from vramcast.simulation.scripts.command_line import parse_command
from vramcast.simulation.scripts.report import RunReport
from vramcast.virtual_gpu.allocator.sizes import MIB

SCRIPTS = Path(__file__).resolve().parents[2] / "tests" / "scripts"
DEVICE = "a100_80gb"
ARGUMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "collected_logits.py": ((), ("--steps",)),
    "generate_eos.py": (("sample",), ("beam",)),
    "graphs.py": (("60",),),
    "grpo.py": (("tiny", "32"),),
    "hf_metrics.py": (("100",),),
    "hf_trainer.py": (("--fixed", "--evaluate"),),
    "lightning_fit.py": (("bf16-mixed",),),
    "seq2seq_generate.py": (("48",),),
}
_NOT_ALONE = ("ranks_", "accelerate_", "qlora", "tiny_text", "saves", "mistral_trainer", "random_lengths")
"""Beginnings of scripts that need a launcher or a folder, are modules of others, or take hours to their end."""
_TOLERANCE = 0.01
_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Comparison:
    """Both runs of a script."""

    title: str
    default: RunReport
    whole: RunReport

    @property
    def difference(self) -> float:
        """Return the share by which the peak of the default run is below that of the whole run."""
        return 1 - _peak_bytes(self.default) / max(_peak_bytes(self.whole), 1)

    @property
    def agrees(self) -> bool:
        """Return True if the peaks agree, or the report names what is missing."""
        return abs(self.difference) <= _TOLERANCE or bool(self.default.missing)


def main() -> None:
    """Print the table; scripts that are named on the command line alone, if any are."""
    parser = argparse.ArgumentParser(prog="run_phases")
    parser.add_argument("scripts", nargs="*", help="names of scripts; default: all")
    names = parser.parse_args().scripts
    chosen = [path for path in sorted(SCRIPTS.glob("*.py")) if not path.name.startswith(_NOT_ALONE)]
    print("| script | default, MiB | whole, MiB | default, s | whole, s | steps | missing |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    different = []
    for path in chosen:
        for arguments in ARGUMENTS.get(path.name, ((),)) if not names or path.name in names else ():
            compared = _compared(path, arguments)
            if isinstance(compared, str):
                print(f"| {path.stem} | {compared} |")
                continue
            print(_row(compared), flush=True)
            different += [] if compared.agrees else [compared.title]
    if different:
        sys.exit(f"peaks differ by more than {_TOLERANCE:.0%} and nothing is named as missing: {', '.join(different)}")


def _compared(path: Path, arguments: tuple[str, ...]) -> Comparison | str:
    reports = [_report(path, arguments, phases) for phases in ("auto", "all")]
    for report in reports:
        if report.failure and not report.steps:
            return report.failure.replace("|", "/")[:100]
    return Comparison(" ".join([path.stem, *arguments]), *reports)


def _report(path: Path, arguments: tuple[str, ...], phases: str) -> RunReport:
    command = parse_command([sys.executable, str(path), *arguments])
    options = RunOptions(phases=phases, timeout_seconds=_TIMEOUT_SECONDS)
    with TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()):
        return run_script(command, load_profile(DEVICE), [], options)


def _peak_bytes(report: RunReport) -> int:
    return max((item.allocated_bytes for item in report.phases), default=0)


def _row(item: Comparison) -> str:
    default, whole = item.default, item.whole
    figures = [f"{_peak_bytes(report) / MIB:,.1f}" for report in (default, whole)]
    seconds = [f"{report.seconds:.1f}" for report in (default, whole)]
    steps = f"{len(default.steps)} of {len(whole.steps)}"
    cells = [item.title, *figures, *seconds, steps, default.missing[0] if default.missing else "nothing"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
