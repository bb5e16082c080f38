"""The process that runs a user's script on a virtual GPU, in the user's interpreter: torch and stdlib alone."""

import io
import math
import os
import re
import runpy
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import getpid  # by their names: a script may replace the functions of a module
from pathlib import Path
from pkgutil import get_importer
from threading import _shutdown as wait_for_threads  # type: ignore[attr-defined]
from threading import get_ident
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn
from warnings import catch_warnings, simplefilter

from vramcast.child.channel import Channel
from vramcast.child.messages import DONE, REFUSED
from vramcast.child.process import signal_name
from vramcast.error_words import text_of
from vramcast.errors import UserError
from vramcast.simulation.sandbox.failures import internal_failure, summary_of, users_traceback
from vramcast.simulation.sandbox.file_protection.kernel import drop_capabilities
from vramcast.simulation.sandbox.file_protection.protection import NONE, OVERLAY, REDIRECT, FileProtection, Keep
from vramcast.simulation.sandbox.isolation import block_network, supervise
from vramcast.simulation.scripts.command_line import Program
from vramcast.simulation.scripts.deadline import Deadline
from vramcast.simulation.scripts.notebooks import notebook_source
from vramcast.simulation.scripts.report_memory import ReportMemory
from vramcast.virtual_gpu.tracing.source_lines import is_fault_of_virtual_gpu, is_users, place_of

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.script_source import ScriptSource

STARTED, REPORTING, NO_SNAPSHOT, FILES = "started", "reporting", "no snapshot", "files"
_ENDED = "the script ended"
_FAILED = "the script failed"
_STOPPED = "stopped"
_FORKED_USE = "a process that the script forked used the GPU: its memory is not counted"
_REFUSED_WRITE = re.compile("[Pp]ermission denied|Operation not permitted|readonly|CalledProcessError|SubprocessError")
_NO_NATIVE_WRITES = (
    "; this machine offers no overlay for files, so they are protected by redirecting Python's own functions, and "
    "other programs and native code may not write: --unprotected lets them"
)
_REFUSED_BY_OVERLAY = re.compile("Value too large for defined data type|Read-only file system")
_NO_COPY = (
    "; files are protected by an overlay, which without privileges copies no file or directory of another owner or "
    "group, and makes nothing new beside a mount: --unprotected lets the script write there"
)
_REPORT_FRAMES = 10_000
"""That a report may add to a stack which a script has filled."""
_exit_at_once = os._exit


def main(report_fd: int) -> None:
    """Run the program of the request on the standard input, report, and leave without unwinding."""
    channel = Channel(report_fd)
    request = channel.next_request()
    if request is None:  # the parent has ended
        return
    try:
        protection = FileProtection(_keep(request), wanted=not request["unprotected"])
    except UserError as error:
        channel.report(REFUSED, reason=str(error))
        return
    memory = ReportMemory()
    supervise(
        protection,
        lambda changes: channel.report(FILES, changes=changes.to_json()),
        keep=[report_fd],
        watch=lambda: channel.write(memory.unread()),
    )
    channel.close()
    with _reported(memory):
        protection.enter()
        if not request["allow_network"]:
            block_network()
        drop_capabilities()
        _Runner(request, memory, protection).run()


def _keep(request: Mapping[str, Any]) -> Keep:
    """Return the files that are to stay: new ones if the user wants them, the snapshot, and results."""
    wanted = [*request["results"], *filter(None, [request["snapshot"]])]
    return Keep(request["keep_files"], request["allow_network"], tuple(map(Path, wanted)))


@contextmanager
def _reported(memory: ReportMemory) -> Iterator[None]:
    """Report an exception that is not the script's, and leave in any case."""
    try:
        yield
    except UserError as error:
        memory.report({"event": REFUSED, "reason": text_of(error)})
    except BaseException as error:  # the script's own are caught where it runs: this one is a fault of vramcast
        memory.report({**internal_failure(error), "place": None})
    _leave()


def _leave(code: int = 0) -> NoReturn:
    """End the process at once: teardown code would move all tensors back to the host."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):  # a script may have closed or replaced it
            stream.flush()
    _exit_at_once(code)


class _Runner:
    """One run of a script, from its request to its report.

    The report is made where the script ends: in its main thread, in the thread that trains, or in that of the deadline.
    """

    def __init__(self, request: Mapping[str, Any], memory: ReportMemory, protection: FileProtection) -> None:
        # all that the report needs is imported before the script runs: it may end without paths, modules or descriptors
        import torch  # noqa: PLC0415

        from vramcast.simulation.scripts.launchers import unwrapped  # noqa: PLC0415
        from vramcast.simulation.scripts.observation import report_of  # noqa: PLC0415
        from vramcast.simulation.scripts.stop_rule import ALL, AUTO, FORWARD_SECONDS, StopRule  # noqa: PLC0415
        from vramcast.virtual_gpu.cuda.emulation import CudaEmulation  # noqa: PLC0415
        from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415
        from vramcast.virtual_gpu.replay.length_orders import LengthOrders  # noqa: PLC0415

        self._report_of, self._out_of_memory = report_of, torch.OutOfMemoryError
        self._memory = memory
        self._request = request
        self._way = protection.way
        self._others = [parse_profile(item) for item in request["devices"]]
        several = request["devices_of_process"] > 1
        ranks = (0, 1) if several else (request["rank"], request["world_size"])
        self._program = unwrapped(Program.from_json(request["program"]), *ranks)
        self._gpu = CudaEmulation(
            parse_profile(request["device"]),
            unbounded=request["unbounded"],
            nonzero_fraction=request["nonzero_fraction"],
            index=int(os.environ.get("LOCAL_RANK", "0")),
            device_count=request["devices_of_process"] if several else int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            observed=request["rank"] if several else None,
            stand_ins=request["stand_ins"],
            files_are_protected=protection.way != NONE,
            watches_source=True,
            native_path=protection.native_path,
        )
        self._gpu.on_forked_use = memory.note_forked_use
        with self._gpu.paused():  # the first time, torch imports what it needs for that
            pass
        self._orders = LengthOrders.from_json(request["orders"]) if request["orders"] else None
        if self._orders:
            self._gpu.history.most_events = math.inf  # orders are replayed with the events of whole steps
        self._rule = StopRule(
            self._gpu.record, self._gpu.forward, self._gpu.coverage, request["steps"], request["phases"]
        )
        self._gpu.runs_all_steps = request["phases"] == ALL
        self._gpu.forward.is_allowed = request["steps"] is None and request["phases"] == AUTO
        self._gpu.forward.on_begin.append(Deadline(FORWARD_SECONDS, self._forward_timeout).start)
        self._process = getpid()
        self._thread_error: BaseException | None = None
        self._reporting: dict[str, tuple[int, object]] = {}
        self._modules = dict(sys.modules)
        self._start = perf_counter()

    def run(self) -> None:
        """Run the script up to the end, an error, or the step after which it may stop."""
        from vramcast.jobs.families.libraries import tolerate_broken_torchvision  # noqa: PLC0415

        tolerate_broken_torchvision()
        self._gpu.record.after_step.append(self._after_step)
        self._observe_endings()
        self._memory.report({"event": STARTED})
        Deadline(self._request["timeout"], self._timeout).start()
        self._gpu.__enter__()
        error: BaseException | None = None
        try:
            with _as_main(self._program):
                _execute(self._program, self._gpu.source)
        except BaseException as raised:  # whatever a foreign script raises, also KeyboardInterrupt
            error = raised
        if _is_success(error) and self._is_first_process():
            with suppress(BaseException):  # Python waits for threads before it ends, and ignores errors meanwhile
                wait_for_threads()
            error = self._thread_error
        self._end(error)

    def _observe_endings(self) -> None:
        """Notice the ways in which a script ends its process other than by returning or raising."""
        threading.excepthook = self._thread_failed
        os._exit = self._exit  # type: ignore[assignment]
        os.execv, os.execve = self._replacing(os.execv), self._replacing(os.execve)  # all others call one of them
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._signalled)
        os.register_at_fork(after_in_child=self._after_fork)
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

    def _is_first_process(self) -> bool:
        """Return False in a process that the script forked: it does not report."""
        return getpid() == self._process

    def _after_fork(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == self._signalled:
                signal.signal(number, signal.SIG_DFL)

    def _thread_failed(self, arguments: Any) -> None:
        """Keep the error of the thread that trains; the script itself continues."""
        threading.__excepthook__(arguments)
        if self._gpu.record.thread == get_ident() and arguments.exc_value is not None:
            self._thread_error = arguments.exc_value

    def _exit(self, code: int) -> NoReturn:
        if self._is_first_process():
            self._end(SystemExit(code))
        _exit_at_once(code)

    def _replacing(self, replace: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def observed(path: Any, *arguments: Any, **named: Any) -> NoReturn:
            if self._is_first_process():
                failure = f"it replaced its process by {text_of(path)}: run the command that it starts"
                self._report(_FAILED, failure=failure)
            replace(path, *arguments, **named)

        return observed

    def _signalled(self, number: int, frame: object) -> None:
        self._report(_FAILED, failure=f"{signal_name(number)} ended it")

    def _end(self, error: BaseException | None) -> None:
        """Report how the script ended; a forked process ends as it would without us."""
        if not self._is_first_process():
            _end_forked(error)
        _ignore_signals()
        if _is_success(error):
            self._report(_ENDED)
        if isinstance(error, SystemExit):
            shown = f"code {error.code}" if isinstance(error.code, int) else f"the message {text_of(error.code)!r}"
            self._report(_FAILED, failure=f"it exited with {shown}")
        if isinstance(error, UserError) and not self._gpu.record.steps:
            with _reported(self._memory):  # one sentence says what a virtual GPU cannot run
                raise UserError(_in_words(error, kind=False)) from error
        if isinstance(error, self._out_of_memory):
            self._report("the script ran out of memory", error, ran_out_of_memory=True)
        if self._gpu.forward.cut_after is not None and error is not None and not is_fault_of_virtual_gpu(error):
            self._report(f"stopped: a loop had ended early, and then the script failed: {_in_words(error)}")
        self._report(_FAILED, error)

    def _after_step(self) -> None:
        reason = self._rule.reason()
        if reason is not None and self._is_first_process():
            self._report(reason)

    def _timeout(self) -> None:
        seconds = self._request["timeout"]
        self._report(f"stopped after {seconds:g} s, the limit (--timeout)", timed_out=True)

    def _forward_timeout(self) -> None:
        seconds = perf_counter() - self._start
        self._report(f"stopped after {seconds:.0f} s: the phases after training took too long (--phases all waits)")

    def _report(
        self,
        ending: str,
        error: BaseException | None = None,
        *,
        failure: str | None = None,
        ran_out_of_memory: bool = False,
        timed_out: bool = False,
    ) -> None:
        """Report and leave; return only if this thread is reporting already."""
        sys.setrecursionlimit(sys.getrecursionlimit() + _REPORT_FRAMES)
        _ignore_signals()
        sys.modules.update(self._modules)  # functions of torch import others, which a script may have removed
        words = _in_words(error) if error is not None else failure
        overlay_refused = bool(words and self._way == OVERLAY and _REFUSED_BY_OVERLAY.search(words))
        if overlay_refused:
            words = f"{words}{_NO_COPY}"
        if words and self._way == REDIRECT and _REFUSED_WRITE.search(words):
            words += _NO_NATIVE_WRITES
        trace = users_traceback(error) if error is not None else ""
        if not self._may_report():
            return
        with _reported(self._memory), catch_warnings(module=warnings), self._gpu.paused():
            simplefilter("ignore")  # a script may have made them errors
            self._memory.report({"event": REPORTING})
            self._gpu.hold_other_threads()
            if self._memory.forked_use:
                self._gpu.assumptions.note_once(_FORKED_USE)
            report = self._report_of(
                self._gpu,
                self._others,
                ending=ending,
                failure=words,
                traceback=trace,
                internal=error is not None and is_fault_of_virtual_gpu(error),
                ran_out_of_memory=ran_out_of_memory,
                timed_out=timed_out,
                overlay_refused=overlay_refused,
                seconds=perf_counter() - self._start,
                orders=self._orders if ending == _ENDED else None,
                has_stopped=ending.startswith(_STOPPED),
                missing=self._missing(ending),
            )
            self._memory.report({"event": DONE, "report": report.to_json()})
            self._write_snapshot()

    def _missing(self, ending: str) -> tuple[str, ...]:
        """Return the phases that were not reached."""
        forward, coverage = self._gpu.forward, self._gpu.coverage
        if ending == _ENDED:
            has_cut = forward.cut_after is not None
            return coverage.missing(natural_end=True, has_unmet=forward.has_unmet) if has_cut else ()
        if not ending.startswith(_STOPPED):
            return ()
        running = self._gpu.record.phase
        unfinished = [f"the end of {running}"] if running in ("evaluation", "generation") else []
        return (*unfinished, *coverage.missing())

    def _may_report(self) -> bool:
        """Return True once, in the first thread that asks; other threads stay here until the process ends."""
        mine = (get_ident(), object())
        first = self._reporting.setdefault("by", mine)  # atomic
        if first[0] != mine[0]:
            threading.Event().wait()
        return first is mine

    def _write_snapshot(self) -> None:
        """Write the snapshot after the report, which a full disk or a lack of memory does not take away."""
        path = self._request["snapshot"]
        if path:
            try:
                self._gpu.write_snapshot(path)
            except (OSError, MemoryError) as error:
                reason = getattr(error, "strerror", None) or "out of memory"
                self._memory.report({"event": NO_SNAPSHOT, "reason": reason})


def _ignore_signals() -> None:
    """Let no signal, trace or profile of the script reach the code that reports."""
    sys.settrace(None)
    sys.setprofile(None)
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            with suppress(OSError):  # SIGKILL and SIGSTOP
                signal.signal(number, signal.SIG_IGN)


def _is_success(error: BaseException | None) -> bool:
    """Return True for the exit code 0; `==` of a code that is an object may do anything."""
    if not isinstance(error, SystemExit):
        return error is None
    return error.code is None or (isinstance(error.code, int) and error.code == 0)


def _end_forked(error: BaseException | None) -> NoReturn:
    """End a forked process that ran to the end of the script, with the words and the code that Python gives."""
    code = 0 if _is_success(error) else 1
    with suppress(BaseException):  # what the script printed to, or its exception, may raise anything
        if isinstance(error, SystemExit):
            if isinstance(error.code, int):
                code = error.code & 0xFF
            elif error.code is not None:
                print(error.code, file=sys.stderr)
        elif error is not None:
            traceback.print_exception(error)
    _leave(code)


@contextmanager
def _as_main(program: Program) -> Iterator[None]:
    """Let the program see the arguments and the path that `python` would give it."""
    sys.argv = [program.name if program.kind != "code" else "-c", *program.arguments]
    first = str(Path(program.name).resolve().parent) if program.kind in ("file", "notebook") else str(Path.cwd())
    sys.path.insert(0, first)
    is_users(program.name)  # remembered, should the script delete its own file
    yield


def _execute(program: Program, source: "ScriptSource") -> None:
    if program.kind == "file" and get_importer(program.name) is None and not program.name.endswith(".pyc"):
        with io.open_code(program.name) as file:
            code = source.compiled(file.read(), program.name, is_main=True)
        exec(code, _main_module(program.name))  # noqa: S102 - not by runpy, which writes to sys.argv at the end
    elif program.kind == "notebook":
        code = source.compiled(notebook_source(Path(program.name), program.parameters), program.name, is_main=True)
        exec(code, _main_module(program.name))  # noqa: S102 - the user's own words
    elif program.kind == "file":
        runpy.run_path(program.name, run_name="__main__")
    elif program.kind == "module":
        source.main_modules = (program.name, f"{program.name}.__main__")
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    else:
        code = source.compiled(program.name, "<string>", is_main=True)
        exec(code, {"__name__": "__main__"})  # noqa: S102 - the user's own words


def _main_module(name: str) -> dict[str, Any]:
    """Return the names of a new main module."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__file__=name, __cached__=None, __package__="")
    return vars(main)


def _in_words(error: BaseException, *, kind: bool = True) -> str:
    place = place_of(error)
    text = summary_of(error) if kind else text_of(error)
    return f"{text} (at {place})" if place else text


if __name__ == "__main__":
    main(int(sys.argv[1]))
