"""Runs of the scripts in tests/scripts, in an interpreter that has the libraries that they need."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from warm_runs import HOST

from vramcast.simulation.scripts.client import RunOptions

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
MIB = 2**20


@cache
def _has(interpreter, library):
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({library!r}) is None)"
    return subprocess.run([interpreter, "-c", code], check=False, capture_output=True).returncode == 0


def interpreter_for(*libraries):
    """Return this interpreter or that of VRAMCAST_SCRIPTS_PYTHON, whichever has the libraries; skip the test else."""
    known = [sys.executable, *filter(None, [os.environ.get("VRAMCAST_SCRIPTS_PYTHON")])]
    for interpreter in known:
        if all(_has(interpreter, library) for library in libraries):
            return interpreter
    pytest.skip(f"needs {', '.join(libraries)}: pip install 'vramcast[scripts]', or name an interpreter that has them")


def run(script, *arguments, needs=(), device="a100_40gb", tmp_path=None, others=(), command=(), **options):
    """Run a script and return its report; a script that fails fails the test."""
    interpreter = interpreter_for(*needs)
    words = [*(command or [interpreter]), str(SCRIPTS / script), *arguments]
    before = Path.cwd()
    os.chdir(tmp_path or before)
    try:
        report = HOST.report(words, [device, *others], RunOptions(**options))
    finally:
        os.chdir(before)
    assert report.failure is None or report.ran_out_of_memory, f"{report.failure}\n{report.traceback}"
    return report


def peaks(report, device="a100_40gb"):
    """Return the allocated and the reserved peak in MiB."""
    found = report.simulation.peaks[device].bounded
    return found.allocated_bytes / MIB, found.reserved_bytes / MIB
