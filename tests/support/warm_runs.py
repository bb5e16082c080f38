"""Runs of scripts by `vramcast run` in a process that has imported torch, and forks their children."""

import json
import sys
from pathlib import Path

from benchmarks.soak.run_host import RunHost

SECONDS = 300


class WarmRuns:
    """A host of runs; it starts with the first one."""

    def __init__(self):
        self._host = None

    def run(self, *words):
        """Call `vramcast run` with the present environment and directory. Return exit code, output and errors."""
        self._host = self._host or RunHost(warm=True)
        answer = self._host.run(words, {}, Path.cwd(), SECONDS)
        if answer is None:
            self.close()
            raise AssertionError(f"no end of vramcast run within {SECONDS} s, or the end of its host: {words}")
        return answer["code"], answer["out"], answer["err"]

    def run_script(self, path, *options):
        """Run a script. Return exit code, JSON answer where there is one, and errors."""
        code, out, err = self.run("--json", *options, "--", sys.executable, str(path))
        return code, json.loads(out) if out else None, err

    def report(self, words, devices, options):
        """Run a script by `run_script`. Return its report."""
        self._host = self._host or RunHost(warm=True)
        found, printed = self._host.report(words, devices, options, Path.cwd(), SECONDS)
        sys.stderr.write(printed)
        if found is None:
            self.close()
            raise AssertionError(f"no end of the run within {SECONDS} s, or the end of its host: {words}")
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self):
        """End the host."""
        if self._host:
            self._host.close()
            self._host = None


HOST = WarmRuns()
"""The one of this process of tests."""
