"""A process that calls `vramcast run` again and again, so that what a run leaves behind in its caller is seen.

`python -m benchmarks.soak.run_host` reads requests from the standard input and answers on the standard output; with
`--warm` it imports torch once, and forks the child of each run (`warm_start`).
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from benchmarks.soak.warm_start import start_warm
from vramcast.child.process_tree import end_descendants
from vramcast.cli import main as vramcast_main

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
        whole = {**os.environ, **environment}
        request = {"arguments": list(arguments), "environment": whole, "directory": str(directory)}
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
        print(json.dumps(_answer(request["arguments"])), flush=True)
        os.chdir("/")


def _answer(arguments: Sequence[str]) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    begin = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = vramcast_main(["run", *arguments])
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
