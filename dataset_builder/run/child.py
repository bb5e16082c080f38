"""The process that runs a user's script on a virtual GPU, in the user's interpreter: torch and stdlib alone."""

import json
import math
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from vramcast.dataset_builder.child_process import write_line
from vramcast.dataset_builder.file_protection.kernel import drop_capabilities
from vramcast.dataset_builder.file_protection.protection import NONE, FileProtection, Keep
from vramcast.dataset_builder.isolation import block_network, supervise
from vramcast.dataset_builder.run.command_line import Program
from vramcast.errors import UserError
from vramcast.virtual_gpu.source_lines import is_fault_of_virtual_gpu, is_users, place_of

_ENDED = "the script ended"
DONE, REFUSED, INTERNAL, FILES = "done", "refused", "internal", "files"


def main(report_fd: int) -> None:
    """Run the program of the request on the standard input, report, and leave without unwinding."""
    request = json.loads(sys.stdin.buffer.readline())
    protection = FileProtection(_keep(request), wanted=not request["unprotected"])
    end = os.dup(report_fd)
    supervise(protection, lambda changes: write_line(end, {"event": FILES, "changes": changes.to_json()}), keep=[end])
    os.close(end)
    os.set_inheritable(report_fd, False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        way = protection.enter()
        if not request["allow_network"]:
            block_network()
        drop_capabilities()
        _Runner(request, report_fd, files_are_protected=way != NONE).run()
    except UserError as error:
        write_line(report_fd, {"event": REFUSED, "reason": str(error)})
    except Exception as error:  # the script's own are reported: this one is a fault of vramcast
        summary = f"{type(error).__name__}: {error}"
        write_line(report_fd, {"event": INTERNAL, "reason": summary, "traceback": traceback.format_exc()})
    _leave()


def _keep(request: Mapping[str, Any]) -> Keep:
    """Return the files that are to stay: new ones if the user wants them, and the snapshot."""
    return Keep(request["keep_files"], (Path(request["snapshot"]),) if request["snapshot"] else ())


def _leave() -> None:
    """End the process at once: teardown code would move all tensors back to the host."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Runner:
    """One run of a script, from its request to its report."""

    def __init__(self, request: Mapping[str, Any], report_fd: int, *, files_are_protected: bool) -> None:
        from vramcast.dataset_builder.run.launchers import unwrapped  # noqa: PLC0415 - imports torch
        from vramcast.dataset_builder.run.stop_rule import StopRule  # noqa: PLC0415
        from vramcast.virtual_gpu.cuda.virtual_cuda import VirtualCuda  # noqa: PLC0415
        from vramcast.virtual_gpu.profile import parse_profile  # noqa: PLC0415

        self._fd = report_fd
        self._request = request
        self._others = [parse_profile(item) for item in request["devices"]]
        self._program = unwrapped(Program.from_json(request["program"]), request["rank"], request["world_size"])
        self._gpu = VirtualCuda(
            parse_profile(request["device"]),
            unbounded=request["unbounded"],
            nonzero_fraction=request["nonzero_fraction"],
            index=int(os.environ.get("LOCAL_RANK", "0")),
            device_count=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            stand_ins=request["stand_ins"],
            files_are_protected=files_are_protected,
        )
        if request["orders"]:
            self._gpu.history.most_events = math.inf  # orders are replayed with the events of whole steps
        self._rule = StopRule(self._gpu.record, request["steps"])
        self._start = time.perf_counter()

    def run(self) -> None:
        """Run the script up to the end, an error, or the step after which it may stop."""
        from vramcast.dataset_builder.families.libraries import tolerate_broken_torchvision  # noqa: PLC0415

        tolerate_broken_torchvision()
        self._gpu.record.after_step.append(self._after_step)
        signal.signal(signal.SIGALRM, self._timeout)
        signal.setitimer(signal.ITIMER_REAL, self._request["timeout"])
        self._gpu.__enter__()
        self._run(self._program)

    def _run(self, program: Program) -> None:
        import torch  # noqa: PLC0415

        try:
            with _as_main(program):
                _execute(program)
        except SystemExit as error:
            if error.code in (None, 0):
                self._report(_ENDED)
            else:
                shown = f"code {error.code}" if isinstance(error.code, int) else f"the message {error.code!r}"
                self._report("the script failed", failure=f"it exited with {shown}")
        except UserError as error:
            if not self._gpu.record.steps:  # one sentence says what a virtual GPU cannot run
                raise UserError(_in_words(error, kind=False)) from error
            self._report("the script failed", error)
        except torch.OutOfMemoryError as error:
            self._report("the script ran out of memory", error, ran_out_of_memory=True)
        except BaseException as error:  # whatever a foreign script raises, also KeyboardInterrupt
            self._report("the script failed", error)
        else:
            self._report(_ENDED)

    def _after_step(self) -> None:
        reason = self._rule.reason()
        if reason is not None:
            self._report(reason)
            _leave()

    def _timeout(self, number: int, frame: FrameType | None) -> None:
        seconds = self._request["timeout"]
        self._report(f"stopped after {seconds:g} s, the limit (--timeout)")
        _leave()

    def _report(
        self,
        ending: str,
        error: BaseException | None = None,
        *,
        failure: str | None = None,
        ran_out_of_memory: bool = False,
    ) -> None:
        from vramcast.dataset_builder.run.observation import report_of  # noqa: PLC0415
        from vramcast.virtual_gpu.length_orders import LengthOrders  # noqa: PLC0415

        orders = self._request["orders"]

        signal.setitimer(signal.ITIMER_REAL, 0)
        with self._gpu.paused():
            if self._request["snapshot"]:
                self._gpu.write_snapshot(self._request["snapshot"])
            report = report_of(
                self._gpu,
                self._others,
                ending=ending,
                failure=_in_words(error) if error is not None else failure,
                traceback=_traceback(error) if error is not None else "",
                internal=error is not None and is_fault_of_virtual_gpu(error),
                ran_out_of_memory=ran_out_of_memory,
                seconds=time.perf_counter() - self._start,
                orders=LengthOrders.from_json(orders) if orders and ending == _ENDED else None,
            )
        write_line(self._fd, {"event": DONE, "report": report.to_json()})


@contextmanager
def _as_main(program: Program) -> Iterator[None]:
    """Let the program see the arguments and the path that `python` would give it."""
    sys.argv = [program.name if program.kind != "code" else "-c", *program.arguments]
    first = str(Path(program.name).resolve().parent) if program.kind == "file" else str(Path.cwd())
    sys.path.insert(0, first)
    yield


def _execute(program: Program) -> None:
    if program.kind == "file":
        runpy.run_path(program.name, run_name="__main__")
    elif program.kind == "module":
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program.name, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the user's own words


def _in_words(error: BaseException, *, kind: bool = True) -> str:
    place = place_of(error)
    text = f"{type(error).__name__}: {' '.join(str(error).split())}" if kind else str(error)
    return f"{text} (at {place})" if place else text


def _traceback(error: BaseException) -> str:
    """Return the traceback with the user's own lines and the last one."""
    frames = list(traceback.extract_tb(error.__traceback__))
    shown = [frame for frame in frames[:-1] if is_users(frame.filename)] + frames[-1:]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
    return "".join([*lines, *traceback.format_exception_only(error)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
