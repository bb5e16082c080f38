"""Threads and worker processes: dispatch modes belong to a thread, so each new one enters them (torch 2.13)."""

import os
import threading
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import worker

from vramcast.virtual_gpu.cuda.patches import Patches

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.emulation import CudaEmulation


_active: WeakSet["CudaEmulation"] = WeakSet()


def _after_fork() -> None:
    for gpu in list(_active):
        gpu.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def apply(patches: Patches, gpu: "CudaEmulation") -> None:
    """Run threads of the script on the virtual GPU, and loader processes without it."""
    _active.add(gpu)
    gpu.callbacks.callback(_active.discard, gpu)
    bootstrap: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    owner = os.getpid()

    def bootstrap_inner(self: threading.Thread) -> None:
        if os.getpid() != owner:
            bootstrap(self)
            return
        with gpu.in_thread():
            bootstrap(self)

    patches.set(threading.Thread, "_bootstrap_inner", bootstrap_inner)
    loop = worker._worker_loop

    @wraps(loop)  # so that it is pickled by torch's name: a spawned process runs torch's own
    def worker_loop(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # the data of a loader is the host's: it runs at full speed
            return loop(*args, **kwargs)

    patches.set(worker, "_worker_loop", worker_loop)
