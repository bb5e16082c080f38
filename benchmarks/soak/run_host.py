"""A process that calls `vramcast run` again and again, so that what a run leaves behind in its caller is seen.

`python -m benchmarks.soak.run_host` reads requests from the standard input and answers on the standard output; with
`--warm` it imports torch once, and forks the child of each run (`warm_start`).
"""

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from benchmarks.soak.warm_start import start_warm
from vramcast.child.process_tree import end_descendants
from vramcast.cli import main as vramcast_main
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.simulation.sandbox.failures import NetworkError
from vramcast.simulation.scripts.client import RunOptions, run_script
from vramcast.simulation.scripts.command_line import parse_command
from vramcast.simulation.scripts.report import RunReport

_MOST_CHARACTERS = 20_000
_WATCH_SECONDS = 0.3
_ROOT = Path(__file__).resolve().parents[2]


class RunHost:
    """A host that is running, from the side of the soak."""

    def __init__(self, *, warm: bool = False) -> None:
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *(["--warm"] if warm else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=_ROOT,
        )  # fmt: skip
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.first: Mapping[str, Any] | None = None
        """The answer to the first request: later ones must not use more of the process."""

    @property
    def pid(self) -> int:
        """The host's process."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        seconds: float,
        watch: Callable[[], None] = lambda: None,
    ) -> Mapping[str, Any] | None:
        """Run a command. Return its exit code and output, None if it has not ended in time or took the host along.

        `watch` is called from time to time meanwhile.
        """
        return self.ask({"arguments": list(arguments)}, environment, directory, seconds, watch)

    def report(
        self, words: Sequence[str], devices: Sequence[str], options: RunOptions, directory: Path, seconds: float
    ) -> tuple[RunReport | BaseException | None, str]:
        """Run a script on the first device. Return its report, or the exception that it ended with, and its output."""
        with tempfile.NamedTemporaryFile() as file:
            request = {"words": list(words), "devices": list(devices), "report": file.name}
            request["options"] = b64encode(pickle.dumps(options)).decode()
            answer = self.ask(request, {}, directory, seconds)
            if answer is None:
                return None, ""
            return pickle.loads(Path(file.name).read_bytes()), answer["err"]

    def ask(
        self,
        what: Mapping[str, Any],
        environment: Mapping[str, str],
        directory: Path,
        seconds: float,
        watch: Callable[[], None] = lambda: None,
    ) -> Mapping[str, Any] | None:
        """Send a request. Return the answer, None if there is none in time or the host has ended."""
        request = {**what, "environment": {**os.environ, **environment}, "directory": str(directory)}
        assert self._process.stdin
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        while self._process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(Empty):
                line = self._lines.get(timeout=_WATCH_SECONDS)
                if line.startswith('{"code"'):
                    answer: dict[str, Any] = json.loads(line)
                    self.first = self.first or answer
                    return answer
            watch()
        return None

    def close(self) -> None:
        """End the host and all that descends from it."""
        end_descendants(self._process.pid, 10)
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Serve requests until the standard input ends."""
    if "--warm" in sys.argv:
        start_warm()
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        print(json.dumps(_answer(request)), flush=True)
        os.chdir("/")


def _report(request: Mapping[str, Any]) -> int:
    """Run a script, and write its report or its error to a file."""
    first, *others = map(load_profile, request["devices"])
    options: RunOptions = pickle.loads(b64decode(request["options"]))
    outcome: RunReport | BaseException
    try:
        outcome = run_script(parse_command(request["words"]), first, others, options)
    except (UserError, NetworkError) as error:
        outcome = error
    Path(request["report"]).write_bytes(pickle.dumps(outcome))
    return 0


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    begin = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = _report(request) if "report" in request else vramcast_main(["run", *request["arguments"]])
        except BaseException:  # an exception that no command should let out
            traceback.print_exc()
            code = 1
    text = err.getvalue()
    return {
        "code": code,
        "out": out.getvalue(),
        "err": text[-_MOST_CHARACTERS:],
        "lines": [item for item in text.splitlines() if item == "STEP" or item.startswith("ATTACK FAILED")][:1000],
        "seconds": time.monotonic() - begin,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()),
    }


if __name__ == "__main__":
    main()
