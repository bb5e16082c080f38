"""Finds an installed cuDNN, starts the process that loads it, and asks it for workspaces."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from vramcast.child.messages import READY
from vramcast.child.process import Child, ChildError, Limits, module_command
from vramcast.errors import UserError
from vramcast.virtual_gpu.tracing.trace import ConvolutionCall

LIBRARY = "VRAMCAST_CUDNN"
"""Names a directory with cuDNN, if it is not among the packages of the interpreter."""
LEAST_RELEASE = (9, 8, 0)
"""The first release that makes execution plans without a GPU."""
_HOW = "install nvidia-cudnn-cu12>=9.8 with pip, or name its directory in VRAMCAST_CUDNN"
_BFLOAT16_CAPABILITY = 8.0
_LONGEST_ANSWER_BYTES = 2**20


@dataclass(frozen=True)
class Installation:
    """The files of a cuDNN that pip or the system installed."""

    library: Path
    needed: tuple[Path, ...] = ()
    """Libraries to load before it: cuBLAS, if pip installed it."""


def find_installation() -> Installation:
    """Return the cuDNN of `VRAMCAST_CUDNN` or of the interpreter's packages; raise UserError if there is none."""
    named = os.environ.get(LIBRARY)
    folders = [Path(named)] if named else [Path(item) for item in sys.path if item]
    for folder in folders:
        for pattern in ("nvidia/cudnn/lib/libcudnn.so.9", "lib/libcudnn.so.9", "libcudnn.so.9"):
            if (library := folder / pattern).is_file():
                return Installation(library, tuple(sorted(folder.glob("nvidia/*/lib/libcublasLt.so.*"))))
    raise UserError(f"expected cuDNN 9 in {named or 'the packages of this interpreter'}, found none: {_HOW}")


class CudnnProcess:
    """A process that has loaded cuDNN."""

    def __init__(self, installation: Installation):
        self._lock = Lock()
        paths = map(str, (installation.library, *installation.needed))
        self._child = Child(
            module_command("vramcast.virtual_gpu.cudnn.child", *paths), os.environ, _LONGEST_ANSWER_BYTES
        )
        try:
            self.release = self._started(installation)
        except BaseException:
            self.close()
            raise

    def _started(self, installation: Installation) -> str:
        """Return the release, as soon as the library is loaded."""
        started = self._checked(lambda: next(self._child.follow(Limits())))
        if started["event"] != READY:
            fix = started.get("fix", _HOW)
            raise UserError(f"expected to load {installation.library}, found {started['reason']}: {fix}")
        release = str(started["release"])
        if tuple(map(int, release.split("."))) < LEAST_RELEASE:
            raise UserError(f"expected cuDNN 9.8 or later, which needs no GPU, found {release}: {_HOW}")
        return release

    def close(self) -> None:
        """End the process."""
        self._child.end_now()

    def workspace_bytes(self, call: ConvolutionCall, capability: float, largest: bool = False) -> int:
        """Return the workspace of the execution plan that torch takes for a call, or the largest of all plans."""
        request = {**_request(call), "capability": capability, "largest": largest}
        with self._lock:
            answer = self._checked(lambda: self._child.ask(request, Limits()))
        workspace = answer.get("workspace")
        if workspace is None:
            raise UserError(
                f"expected an execution plan of cuDNN {self.release} for {_words(call)} on compute capability "
                f"{capability}, found {answer.get('reason', 'none')}: choose a device profile with rules"
            )
        return int(workspace)

    @property
    def has_ended(self) -> bool:
        """True if the process crashed or was killed."""
        return self._child.has_ended()

    def _checked(self, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return an answer; raise UserError if the process has ended."""
        try:
            return ask()
        except ChildError:
            self._child.kill()
            raise UserError(
                f"expected answers of cuDNN, found that its process ended with code {self._child.exit_code} "
                f"({self._child.last_output or 'no message'}): if it happens again, install another release or choose "
                "a device profile with rules"
            ) from None
        except BaseException:
            self._child.kill()  # an interrupt may leave an answer behind, which the next request would take
            raise


def _request(call: ConvolutionCall) -> dict[str, Any]:
    """Return a call as cuDNN sees it: torch runs 1-D convolutions as 2-D ones of height 1 (Convolution.cpp, view4d)."""
    flat = len(call.x) == 3
    shapes = {name: [*shape[:2], *([1] if flat else []), *shape[2:]] for name, shape in call.shapes.items()}
    dimensions = len(shapes["x"]) - 2
    spread = {
        "stride": _spread(call.stride, dimensions, 1),
        "padding": _spread(call.padding, dimensions, 0),
        "dilation": _spread(call.dilation, dimensions, 1),
    }
    rest = {"direction": call.direction, "dtype": call.dtype, "channels_last": call.channels_last}
    return {**shapes, **spread, **rest}


def _spread(values: tuple[int, ...], dimensions: int, neutral: int) -> list[int]:
    """Return a value for each dimension; a missing first one is neutral."""
    return [neutral] * (dimensions - len(values)) + list(values)


def _words(call: ConvolutionCall) -> str:
    """Return a call in a few words."""
    shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in call.shapes.items())
    return f"a convolution ({call.direction}, {shapes}, {call.dtype})"


_started: dict[tuple[int, Installation], CudnnProcess] = {}
"""The running cuDNN by process: a fork of a process must not share its pipes."""
_starting = Lock()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_starting._at_fork_reinit)  # type: ignore[attr-defined]


def installed_cudnn() -> CudnnProcess:
    """Return the process of the installed cuDNN; it is started once, and again after it has ended."""
    key = os.getpid(), find_installation()
    with _starting:
        if key in _started and _started[key].has_ended:
            _started.pop(key).close()
        if key not in _started:
            _started[key] = CudnnProcess(key[1])
        return _started[key]


@lru_cache(maxsize=2**16)  # a trace repeats its calls, and one trace serves several devices
def workspace_bytes(call: ConvolutionCall, capability: float, release: str, largest: bool = False) -> int:
    """Return the workspace of a call by the installed cuDNN, which must be of a release.

    Args:
        call: The call.
        capability: The compute capability of the GPU.
        release: The release that a profile names.
        largest: Return the largest workspace of all execution plans, which cudnn.benchmark allocates.

    """
    if runs_without_cudnn(call, capability):
        return 0
    cudnn = installed_cudnn()
    if cudnn.release != release:
        raise UserError(
            f"expected cuDNN {release}, which the device profile names, found {cudnn.release}: install that release, "
            "or make the profile again with `vramcast device calibrate NAME --from-cudnn --force`"
        )
    return cudnn.workspace_bytes(call, capability, largest)


def runs_without_cudnn(call: ConvolutionCall, capability: float) -> bool:
    """Return True for calls that torch does not give to cuDNN (Convolution.cpp, use_cudnn and use_cudnn_depthwise).

    Besides `is_unsupported`, these are depthwise convolutions of tensors in NCHW. In half precision torch gives some of
    the latter to cuDNN, which is not simulated.
    """
    return is_unsupported(call, capability) or (call.is_depthwise and not call.channels_last)


def is_unsupported(call: ConvolutionCall, capability: float) -> bool:
    """Return True for empty batches, and for bfloat16 before compute capability 8.0."""
    return 0 in call.x or (call.dtype == "bfloat16" and capability < _BFLOAT16_CAPABILITY)
