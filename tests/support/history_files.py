"""Histories for tests: what a database holds, and files of earlier versions."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import text

from vramcast.collocation.observed_peak import ObservedPeak
from vramcast.collocation.service.storage import Storage
from vramcast.dataset_builder.store.lines import encode_line

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
HEADER = encode_line("history", {"version": 1})
WRITER = """
import asyncio, sys, time
from pathlib import Path
from vramcast.collocation.service.history import History
from vramcast.collocation.service.history import NotStoredError
from vramcast.collocation.service.settings import Limits
from vramcast.collocation.service.storage import Storage

{}
"""
OBSERVE_UNTIL_KILLED = """
async def observe(history, worker):
    for index in range(1_000_000):
        key = b"%16d" % (8 * index + worker)
        await history.observe(key, 1 + index)
        print(key.decode().strip(), 1 + index, flush=True)

async def main():
    history = History(sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1]), Limits())
    await asyncio.gather(*(observe(history, worker) for worker in range(8)))

asyncio.run(main())
"""


def read_peaks(place: str | Path) -> dict[bytes, ObservedPeak]:
    """Return what the next service reads."""
    storage = Storage(place, 1_000_000)
    try:
        storage.prepare()
        with storage.reading() as connection:
            rows = connection.execute(text("SELECT job, runs, peak_bytes FROM observed")).all()
        return {bytes(job): ObservedPeak(runs, peak) for job, runs, peak in rows}
    finally:
        storage.close()


def line(key: bytes, runs: int = 0, peak_bytes: int = 0) -> bytes:
    """Return a line of a file of an earlier version; without runs, of a forgotten job."""
    values: dict[str, Any] = {"job": key.hex(), **({"runs": runs, "peak_bytes": peak_bytes} if runs else {})}
    return encode_line("known" if runs else "forgotten", values)


def acknowledged_before_a_kill(place: str, lines: int) -> dict[bytes, int]:
    """Return what a process acknowledged until it was killed."""
    command = [sys.executable, "-c", WRITER.format(OBSERVE_UNTIL_KILLED), place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        words = [process.stdout.readline().split() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        words += [text.split() for text in process.stdout if text.endswith("\n")]
    return {b"%16d" % int(key): int(peak) for key, peak in words}
