"""Shared libraries that tests compile from C."""

import os
import shutil
import subprocess
from pathlib import Path


def compile_library(source: Path, target: Path) -> Path | None:
    """Compile a shared library and return its directory; return None without a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, source], check=True)
    return target.parent
