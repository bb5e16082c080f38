"""Children of `vramcast run` that are forked from a process which has imported torch, instead of started anew.

A run takes three seconds of imports and a tenth of one for all else. The code of the child is the same from its first
line on; `vramcast.start` and the import of torch are left out.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from vramcast.child import process as child_process
from vramcast.simulation.scripts import child

_WORDS = 4
"""Interpreter, start, module and descriptor: the command has more if the interpreter gets options."""
_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores them, and `subprocess` restores them in its children."""


_ROOT = Path(__file__).resolve().parents[2]


class ForkedProcess:
    """A child, with the part of `subprocess.Popen` that `Child` uses."""

    def __init__(
        self, words: Sequence[str], *, stdout: int, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
    ) -> None:
        self.returncode: int | None = None
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become_child((reader, stdout, stdout), int(words[-1]), env)
        os.close(reader)
        self.stdin = os.fdopen(writer, "wb", 0)

    def wait(self) -> int:
        """Return how the child ended."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _become_child(streams: Sequence[int], report_fd: int, environment: Mapping[str, str]) -> NoReturn:
    """Do in a forked process what starts a child, and run it."""
    try:
        os.setsid()
        for number in _DEFAULT_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - descriptors
            if int(name) not in (0, 1, 2, report_fd):
                with suppress(OSError):
                    os.close(int(name))
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = [child.__file__, str(report_fd)]
        sys.path[:] = [item for item in sys.path if Path(item).resolve() != _ROOT]  # whose packages a script may have
        child.main(report_fd)
    except BaseException:  # the host must not go on twice
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def start_warm() -> None:
    """Import all that a run needs, and let runs of this interpreter fork their children from here on."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            _write_modules_of_a_run(writer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as names:
        for name in json.load(names):
            with suppress(Exception):  # some modules are not for import
                importlib.import_module(name)
    child_process.subprocess = SimpleNamespace(Popen=_started, PIPE=subprocess.PIPE)  # type: ignore[assignment]


def _write_modules_of_a_run(channel: int) -> None:
    """Train on a virtual GPU, in a process of its own: one that has used a GPU cannot be forked."""
    from vramcast.virtual_gpu_context import VirtualGPU  # noqa: PLC0415

    with VirtualGPU() as gpu:
        import torch  # noqa: PLC0415

        network = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network(torch.zeros(8, 8, device="cuda")).sum().backward()
        optimizer.step()
    gpu.answer()
    with os.fdopen(channel, "w") as names:
        json.dump([name for name in sys.modules if not name.startswith("__")], names)


def _started(words: Sequence[str], **options: Any) -> Any:
    is_run = len(words) == _WORDS and words[0] == sys.executable and words[2] == child.__name__
    if not is_run or options.get("cwd") is not None:
        return subprocess.Popen(words, **options)
    return ForkedProcess(words, **options)
