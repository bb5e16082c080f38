"""Attacks on `vramcast run`: scripts that change files, processes, signals, threads and descriptors, and kills.

Whatever a script does: the run ends in time with a documented exit code, the report holds the known peak, no process
and no scratch directory stays, and no file of the user changes.
"""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.soak.file_sequences import fingerprint, prepare
from benchmarks.soak.run_host import RunHost
from benchmarks.soak.script_attacks import KNOWN_MIB, STEP, Script, script
from vramcast.simulation.sandbox.file_protection import kernel, overlay
from vramcast.simulation.sandbox.file_protection.protection import FORCED, OVERLAY, REDIRECT

WAYS = (OVERLAY, REDIRECT)
MARK = "VRAMCAST_SOAK_MARK"
"""The environment variable that names a run, so that its processes are recognised."""
_MARGIN_SECONDS = 60
"""For imports and the report, on a busy machine."""
_END_SECONDS, _KILLED_SECONDS = 5, 20
_SEQUENCES_SECONDS = 900
_SCRATCH_LOCK = re.compile(r"/vramcast-files-\w+/lock$")
_STALE_SECONDS = 120
_SENTINELS = 12
_MOST_KILL_SECONDS, _SHARE_OF_LATE_KILLS = 4.0, 0.5
_MOST_GROWTH = 2
"""Descriptors of the caller: a log file, or a library that is imported later."""
_ROOT = Path(__file__).resolve().parents[2]


def offered_ways() -> tuple[list[str], dict[str, str]]:
    """Return the ways of protection that this machine offers, and the reasons why it does not offer the others."""
    missing = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        if not overlay.works(Path(scratch)):
            missing[OVERLAY] = "no mount namespace with overlayfs"
    if not kernel.can_refuse_writes():
        missing[REDIRECT] = "no Landlock of Linux 6.2"
    return [way for way in WAYS if way not in missing], missing


# --- files -----------------------------------------------------------------------------------------------------------


def compared_sequences(directory: Path, way: str, first: int, end: int) -> list[str]:
    """Carry out sequences of file operations under a way of protection, and on equal directories without; compare."""
    roots = {side: directory / side for side in ("protected", "plain")}
    for root in roots.values():
        _removed(root)
        for seed in range(first, end):
            prepare(root / str(seed), seed)
    before = fingerprint(roots["protected"])
    words = [sys.executable, "-m", "benchmarks.soak.file_sequences"]
    numbers = [str(first), str(end)]
    options = ["--json", "--timeout", str(_SEQUENCES_SECONDS), "--"]
    run = _called([*_VRAMCAST, *options, *words, str(roots["protected"]), *numbers], {FORCED: way})
    after = fingerprint(roots["protected"])
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    faults = [f"{way} {path}: changed on the disk" for path in sorted(changed)]
    if run.returncode:
        faults.append(f"{way} {first} to {end}: exit code {run.returncode}, {run.stderr[-300:]!r}")
    elif os.geteuid() == 0:  # as another user, who may do what depends on modes that an overlay and copies change
        plain = _called([*words, str(roots["plain"]), *numbers], {})
        with_protection, without = _sequences(run.stderr), _sequences(plain.stdout)
        for seed in range(first, end):
            faults += _differences(f"{way} sequence {seed}", with_protection.get(seed), without.get(seed))
    for root in roots.values():
        _removed(root)
    return faults


_VRAMCAST = [sys.executable, "-m", "vramcast", "run"]


def _called(words: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), **environment}
    return subprocess.run(words, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)


def _sequences(text: str) -> dict[int, list[Any]]:
    return {item[0]: item for line in text.split("\n") if line.startswith("[") for item in [json.loads(line)]}


def _differences(title: str, protected: list[Any] | None, plain: list[Any] | None) -> Iterator[str]:
    """Yield the first operation that returned something else, or else what looks different at the end."""
    if protected is None or plain is None:
        yield f"{title}: no result"
        return
    for number, (one, other) in enumerate(zip(protected[1], plain[1], strict=True)):
        if one != other:
            yield f"{title}, operation {number}: {one}, without protection {other[2]}"
            return
    if protected[2] != plain[2]:
        seen = [item for item in protected[2] if item not in plain[2]]
        missing = [item for item in plain[2] if item not in protected[2]]
        yield f"{title}: at the end {seen}, without protection {missing}"


def _removed(root: Path) -> None:
    for directory, names, _ in os.walk(root):
        for name in names:
            with suppress(OSError):
                if not (path := Path(directory, name)).is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(root, ignore_errors=True)


# --- scripts ---------------------------------------------------------------------------------------------------------


class Scripts:
    """Runs scripts in a host, one after the other, and checks what is left of each."""

    def __init__(self, directory: Path, ways: list[str]) -> None:
        self._directory = directory
        self._ways = ways
        self._host: RunHost | None = None

    def close(self) -> None:
        """End the host."""
        if self._host:
            self._host.close()
            self._host = None

    def run(self, seed: int) -> tuple[str, list[str]]:
        """Run the script of a seed. Return how it ended, and what is wrong."""
        return self.check(script(seed), seed)

    def check(self, attacked: Script, seed: int) -> tuple[str, list[str]]:
        """Run a script. Return how it ended, and what is wrong."""
        self._host = self._host or RunHost()
        way = self._ways[seed % len(self._ways)] if self._ways else ""
        place = Place(self._directory / "scripts", seed)
        limit = attacked.seconds + _MARGIN_SECONDS
        path = place.working / "train.py"
        path.write_text(attacked.text, encoding="utf-8")
        before = fingerprint(place.root)
        options = ["--json", "--timeout", str(attacked.seconds), *attacked.options]
        words = [*options, "--", sys.executable, str(path), str(place.sentinels), place.mark]
        answer = self._host.run(words, {MARK: place.mark, FORCED: way}, place.working, 2 * limit, place.watch)
        faults = place.faults(before, {self._host.pid}, _END_SECONDS)
        if answer is None:
            self._host.close()
            self._host = None
            return "hangs", [f"no end within {2 * limit} s", *faults]
        faults += _ending_faults(attacked, answer, limit)
        if self._ways and not place.has_scratch:
            faults.append("its scratch directory was not seen")
        first = self._host.first or answer
        for name in ("descriptors", "threads", "children"):
            if answer[name] > first[name] + _MOST_GROWTH:
                faults.append(f"{answer[name]} {name} of the caller, {first[name]} after the first run")
        place.remove()
        ending = f"{answer['code']}{'' if answer['out'] else ' without a report'}"
        notes = sorted({item for item in answer["lines"] if item != STEP})
        title = f"{way} {', '.join(attacked.names)}: "
        return ending + "".join(f"; {item}" for item in notes), [f"{title}{text}" for text in faults]


def _ending_faults(attacked: Script, answer: Mapping[str, Any], limit: float) -> Iterator[str]:
    code, text, err = answer["code"], answer["out"], answer["err"]
    if answer["seconds"] > limit:
        yield f"ended after {answer['seconds']:.0f} s"
    report = None
    if text:
        try:
            report = json.loads(text)
        except ValueError:
            yield f"the standard output is not one JSON object: {text[:100]!r}"
            return
    if (code, report is not None) not in attacked.outcomes:
        expected = sorted(attacked.outcomes)
        yield f"exit code {code} {'with' if report else 'without'} a report, expected {expected}: {err[-600:]!r}"
    if code and "vramcast run: " not in err:
        yield f"exit code {code} without a sentence: {err[-300:]!r}"
    if report is None:
        return
    run = report["run"]
    peak_mib = max((phase["allocated"] for phase in run["phases_mib"].values()), default=0)
    if (attacked.has_trained or STEP in answer["lines"]) and peak_mib < KNOWN_MIB:
        yield f"a peak of {peak_mib} MiB, expected {KNOWN_MIB} MiB or more"
    if "(--timeout)" in run["ending"] and not attacked.waits:
        yield f"ended by the time limit: {run['ending']}"
    if code == 3 and not run["failure"]:
        yield "exit code 3 without a failure in the report"


class Place:
    """The files of one run: its working directory, and sentinels that must not change."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.mark = f"7{seed:06d}{random.SystemRandom().randrange(10**6):06d}"
        """Digits, so that `sleep` takes it as the end of its argument."""
        self.root = directory / self.mark
        self.working, self.sentinels = self.root / "working", self.root / "sentinels"
        self._scratch: set[Path] = set()
        for path in (self.working, self.sentinels):
            path.mkdir(parents=True)
        draw = random.Random(seed)
        for number in range(_SENTINELS):
            (self.sentinels / str(number)).write_bytes(draw.randbytes(draw.choice((1, 100, 5000))))

    def faults(self, before: Mapping[str, object], others: Iterable[int], seconds: float) -> list[str]:
        """Return what a run has left behind, at the latest after some seconds; end its processes."""
        faults = []
        left = _when_none(lambda: processes_of(self.mark, self.root, others), seconds)
        for pid, title in left:
            faults.append(f"the process {title} is still alive")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        after = fingerprint(self.root)
        changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        faults += [f"{path} changed on the disk" for path in sorted(changed)]
        left = _when_none(self.abandoned, seconds)
        return faults + [f"{path} was left" for path in left]

    def watch(self) -> None:
        """Notice the scratch directories that processes of the run hold: other runs on the machine have their own."""
        for pid, _ in processes_of(self.mark, self.root, ()):
            with suppress(OSError):
                targets = [os.readlink(item.path) for item in os.scandir(f"/proc/{pid}/fd")]  # noqa: PTH115
                self._scratch |= {Path(target).parent for target in targets if _SCRATCH_LOCK.search(target)}

    def abandoned(self) -> list[Path]:
        """Return the scratch directories of the run that are left, and that no process holds."""
        return [path for path in sorted(self._scratch) if _is_abandoned(path)]

    @property
    def has_scratch(self) -> bool:
        """Whether a scratch directory was seen."""
        return bool(self._scratch)

    def remove(self) -> None:
        """Remove the files of the run."""
        _removed(self.root)


def _when_none(find: Callable[[], list[Any]], seconds: float) -> list[Any]:
    """Return what is found, once nothing is or some seconds have passed."""
    until = time.monotonic() + seconds
    while (items := find()) and time.monotonic() < until:
        time.sleep(0.1)
    return items


def processes_of(mark: str, directory: Path, others: Iterable[int]) -> list[tuple[int, str]]:
    """Return the processes with a mark in their environment or arguments, or that work below a directory."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        if pid in others or pid == os.getpid():
            continue
        with suppress(OSError):
            words, environment = (path / "cmdline").read_bytes(), b""
            with suppress(OSError):
                environment = (path / "environ").read_bytes()
            working = str((path / "cwd").readlink())
            if mark.encode() in words + environment or working.startswith(str(directory)):
                processes.append((pid, f"{pid} {words.replace(bytes(1), b' ').decode(errors='replace')[:200]}"))
    return processes


def _is_abandoned(path: Path) -> bool:
    """Return True for a scratch directory whose supervisor has ended: nobody holds its lock."""
    try:
        with (path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return path.exists()
    except OSError:
        return False
    return True


# --- kills -----------------------------------------------------------------------------------------------------------

_KILLED = """
import os, signal, subprocess, sys, time
import torch

sentinels, mark = sys.argv[1:]
subprocess.Popen(["sleep", "600." + mark], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(600)
network = torch.nn.Linear(256, 256).cuda()
while True:
    network(torch.randn(4, 256, device="cuda")).sum().backward()
    for name in os.listdir(sentinels):
        with open(f"{sentinels}/{name}", "w") as file:
            file.write("x")
"""


def killed(directory: Path, number: int, ways: list[str]) -> list[str]:
    """Kill `vramcast run` at a random time, by one of the signals that end it. Return what was left behind."""
    draw = random.Random(f"kill {number}")
    place = Place(directory / "kills", number)
    way = ways[number % len(ways)] if ways else ""
    sent = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3]
    script_path = place.working / "train.py"
    script_path.write_text(_KILLED, encoding="utf-8")
    before = fingerprint(place.root)
    words = [*_VRAMCAST, "--steps", "1000000", "--", sys.executable, str(script_path), str(place.sentinels), place.mark]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), MARK: place.mark, FORCED: way}
    before_start = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    process = subprocess.Popen(
        words, cwd=place.working, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before_start)
    # most of the time goes by before the script runs: some kills wait for it
    if draw.random() < _SHARE_OF_LATE_KILLS:
        _when_none(lambda: [] if _sleeps(place.mark) else [1], _MARGIN_SECONDS)
    seconds = draw.uniform(0, _MOST_KILL_SECONDS)
    time.sleep(seconds)
    place.watch()
    process.send_signal(sent)
    faults = []
    try:
        process.wait(_KILLED_SECONDS)
    except subprocess.TimeoutExpired:
        faults.append(f"runs {_KILLED_SECONDS} s after {sent.name}")
        process.kill()
        process.wait()
    left = _when_none(place.abandoned, _END_SECONDS)
    faults += [text for text in place.faults(before, (), _KILLED_SECONDS) if not text.endswith(" was left")]
    left = place.abandoned() or left
    if sent == signal.SIGKILL:
        faults += _kept_by_a_later_run(left)
    else:
        faults += [f"{path} was left" for path in left if path.exists()]
    place.remove()
    return [f"{sent.name} after {seconds:.2f} s ({way}): {text}" for text in faults]


def _sleeps(mark: str) -> bool:
    return any(re.search(rf"sleep 600\.{mark}", title) for _, title in processes_of(mark, Path("/nowhere"), ()))


def _kept_by_a_later_run(left: list[Path]) -> Iterator[str]:
    """Yield the directories that a later run, when they have aged, does not remove."""
    left = [path for path in left if path.exists()]
    if not left:
        return
    past = time.time() - _STALE_SECONDS
    for path in left:
        os.utime(path, (past, past))
    _called([*_VRAMCAST, "--", sys.executable, "-c", ""], {})
    yield from (f"{path} is not removed by a later run" for path in left if path.exists())
