"""The process of a worker: it loads a backend, then measures specs in chunks, and reports one outcome per spec.

Outcomes are reported in the order of the specs, so a dead worker was working on the first spec without one.
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import process, spawn
from typing import Any

from vramcast.child.channel import Channel, end_with_parent
from vramcast.child.messages import DONE, FAILED, READY, REFUSED
from vramcast.dataset_builder.backends._base import Backend
from vramcast.dataset_builder.executors._base import attempt, crashed, describe
from vramcast.errors import UserError
from vramcast.jobs.spec import Spec


def main(report_fd: int) -> None:
    """Measure specs until the parent closes its end or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the parent blocked it during the start
    channel = Channel(report_fd)
    request = channel.next_request()
    if request is None:
        return
    if request["bind"]:
        end_with_parent()
    inbox = channel.inbox(request["parent"])
    _prepare(request["preparation"])
    with suppress(BrokenPipeError):  # the parent has ended
        try:
            backend = pickle.loads(request["payload"])  # noqa: S301 - from our own parent
            channel.report(READY)
            while (chunk := inbox.get()) is not None:
                for spec in pickle.loads(chunk["payload"]):  # noqa: S301
                    _forget_output()
                    _measure(channel, backend, spec)
        except UserError as error:
            channel.report(REFUSED, reason=str(error))
        except (Exception, SystemExit) as error:
            channel.report(FAILED, reason=describe(error))


def _prepare(preparation: Mapping[str, Any]) -> None:
    """Take over the path and the main module of the parent, by which it pickles classes of its own."""
    process.current_process()._inheriting = True  # type: ignore[attr-defined] # a main module that starts workers fails
    try:
        spawn.prepare(dict(preparation))
    finally:
        del process.current_process()._inheriting  # type: ignore[attr-defined]


def _forget_output() -> None:
    """Empty the log: it holds the output of one spec, which is evidence if this process dies."""
    with suppress(OSError):
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def _measure(channel: Channel, backend: Backend, spec: Spec) -> None:
    start = time.perf_counter()
    outcome = attempt(backend, spec)
    seconds = time.perf_counter() - start
    try:
        payload = pickle.dumps(outcome)
    except Exception as error:
        payload = pickle.dumps(crashed(describe(error)))
    channel.report(DONE, payload, seconds=seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]))
