"""The stub of NVML: compiles it, writes its state, and runs programs that load it."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from c_libraries import compile_library

SOURCE = Path(__file__).with_name("nvml_stub.c")
GIB = 2**30
LOST, NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, VERSION_MISMATCH, UNKNOWN = 15, 3, 4, 9, 18, 999


def compile_stub(directory: Path) -> Path | None:
    """Compile libnvidia-ml.so.1 into a directory; return None without a compiler."""
    return compile_library(SOURCE, directory / "libnvidia-ml.so.1")


def without_driver(directory: Path) -> Path:
    """Write an invalid library into a directory, so that the loader finds no driver behind it either."""
    (directory / "libnvidia-ml.so.1").write_text("no library")
    return directory


@dataclass
class StubState:
    """The state of the stub. `write` makes it visible to all processes that loaded the stub."""

    path: Path
    lines: list[str] = field(default_factory=list)

    def gpu(self, uuid="GPU-a", name="NVIDIA A100-SXM4-40GB", total=40 * GIB, used=0, reserved=GIB // 2, mig=0, code=0):
        return self.add(f"gpu {uuid} {total} {used} {reserved} {mig} {code} {name}")

    def instance(self, index, uuid, total=5 * GIB, used=0, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb"):
        return self.add(f"mig {index} {uuid} {total} {used} {name}")

    def process(self, pid, used, uuid="GPU-a", kind="c"):
        return self.add(f"process {uuid} {pid} {used} {kind}")

    def add(self, line):
        self.lines.append(line)
        return self

    def write(self) -> "StubState":
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        temporary.write_text("\n".join(self.lines) + "\n")
        temporary.rename(self.path)
        return self


@dataclass(frozen=True)
class Driver:
    """A machine whose driver is the stub."""

    library: Path
    folder: Path

    @property
    def stub(self) -> StubState:
        return StubState(self.folder / "gpus.txt")

    def environment(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "NVIDIA_"))}
        return {
            **inherited,
            "LD_LIBRARY_PATH": str(self.library),
            "NVML_STUB": str(self.folder / "gpus.txt"),
            "TMPDIR": str(self.folder),  # where the locks are
            "PYTHONPATH": str(SOURCE.parent),
            **more,
        }

    def run(self, code: str, *args: str, **more: str) -> "subprocess.CompletedProcess[str]":
        """Run Python code that finds the stub as libnvidia-ml.so.1."""
        return subprocess.run(
            [sys.executable, "-c", code, *args],
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
