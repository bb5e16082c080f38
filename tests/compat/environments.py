"""Environments with older releases of torch and transformers, made once below `.venvs`."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cuda_stubs import write_stubs

ROOT = Path(__file__).resolve().parents[2] / ".venvs"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_TORCH_NEEDS = (
    "filelock",
    "fsspec",
    "jinja2",
    "MarkupSafe",
    "mpmath<1.4",
    "networkx",
    "sympy==1.13.1",
    "typing_extensions",
)


@dataclass(frozen=True)
class Environment:
    """An interpreter with certain releases."""

    name: str
    torch: str | None = None
    """A release of its own, else that of the running interpreter."""
    libraries: tuple[str, ...] = ()
    """Installed without their dependencies, before those of the running interpreter."""
    over: str | None = None
    """Another environment whose libraries come before those of the running interpreter."""

    @property
    def python(self) -> Path:
        """The path of the interpreter."""
        return ROOT / self.name / "bin" / "python" if self.torch or self.libraries else Path(sys.executable)

    def make(self) -> None:
        """Create the environment, if it was not completed before."""
        done = ROOT / self.name / "complete"
        if self.python == Path(sys.executable) or done.exists():
            return
        shutil.rmtree(ROOT / self.name, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", ROOT / self.name], check=True)
        if self.torch:
            self._install_torch()
        else:
            libraries = [item for item in sys.path if Path(item).name in ("site-packages", "dist-packages")]
            below = [str(Environment(self.over).home)] if self.over else []
            (self.home / "libraries.pth").write_text("\n".join([*below, *libraries]) + "\n")
        if self.libraries:
            self._pip("--no-deps", "--ignore-installed", *self.libraries)
        done.touch()

    @property
    def home(self) -> Path:
        """The directory of its libraries."""
        return next((ROOT / self.name).glob("lib/python*/site-packages"))

    def _install_torch(self) -> None:
        """Install torch and nothing but what it needs; a CPU build, or a CUDA build with stubs in place of CUDA."""
        release = f"torch=={self.torch}"
        try:
            self._pip("--no-deps", "--index-url", CPU_INDEX, "--retries", "0", "--timeout", "10", f"{release}+cpu")
        except subprocess.CalledProcessError:
            self._pip("--no-deps", release)
            write_stubs(self.home / "torch" / "lib")
        self._pip("--no-deps", *_TORCH_NEEDS)

    def _pip(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", *words], check=True)


_TRANSFORMERS = ("transformers==4.51.3", "tokenizers==0.21.1", "huggingface_hub==0.30.2")
ENVIRONMENTS = (
    Environment("newest"),
    Environment("torch-2.9", torch="2.9.1"),
    Environment("torch-2.6", torch="2.6.0"),
    Environment("transformers-4.51", libraries=_TRANSFORMERS),
    Environment("both-old", libraries=_TRANSFORMERS, over="torch-2.6"),
)
