"""Isolation of a user's code: a supervised process tree, no network, and an environment without secrets.

The child calls `supervise` and then `block_network` before it imports anything else: both need a process of one
thread. Only the standard library is imported, because the interpreter may be a user's own.
"""

import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from vramcast.child.process_tree import descendants, end_descendants
from vramcast.simulation.sandbox.file_protection.changes import Changes
from vramcast.simulation.sandbox.file_protection.kernel import CLONE_NEWNET, enter_namespace
from vramcast.simulation.sandbox.file_protection.protection import FileProtection

ALLOWED, BLOCKED = "allowed", "blocked"
"""The network, as a user wants it."""
NAMESPACE, SECCOMP, OPEN = "namespace", "seccomp", "open"
"""How it is blocked."""

_PASSED = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "TEMP", "TMP",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH",
    "CUBLAS_WORKSPACE_CONFIG", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_DATASETS_CACHE",
    "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    "XDG_DATA_HOME", "MPLCONFIGDIR", "MPLBACKEND", "VRAMCAST_CUDNN",
}  # fmt: skip
_PASSED_PREFIXES = ("PYTHON", "LC_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "OMP_", "MKL_", "KMP_")
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38  # linux/prctl.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # linux/sockios.h, linux/if.h
_SCMP_ACT_ALLOW, _SCMP_ACT_ERRNO, _SCMP_CMP_NE = 0x7FFF0000, 0x00050000, 1  # seccomp.h
SUPERVISOR_SECONDS = 20.0
"""For a supervisor to end all that it watches over, and to remove the scratch directory of a code's files."""
_END_SECONDS = 5.0
_WATCH_SECONDS = 0.2
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a script may send to whoever started it."""


def clean_environment(environment: Mapping[str, str], *, allow_network: bool = False) -> dict[str, str]:
    """Return the variables that a user's code may see: an allow-list, offline settings, one thread, no GPU."""
    passed = {name: value for name, value in environment.items() if _is_passed(name)}
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**passed, **({} if allow_network else _OFFLINE), **quiet}


def _is_passed(name: str) -> bool:
    allowed = name in _PASSED or name.startswith(_PASSED_PREFIXES)
    return allowed and not any(word in name for word in SECRET_WORDS)


def supervise(
    protection: FileProtection | None = None,
    finish: Callable[[Changes], None] | None = None,
    keep: Sequence[int] = (),
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Continue in a new process, and let this one watch over it and over all that it starts.

    The supervisor adopts processes that lose their parent, such as a daemon that forked twice. It ends them all when
    the worker ends, when it gets SIGTERM, and when its own parent dies. Then it ends as the worker did. The worker
    leads a session of its own: a signal to its group does not reach the supervisor.

    Args:
        protection: The protection of files that the worker enters; the supervisor removes its scratch directory.
        finish: Called with the changes of files when the worker has ended.
        keep: Descriptors that the supervisor does not close.
        watch: Called from time to time, and when the worker has ended.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # code that aborts leaves no dump behind
    parent = os.getpid()
    worker = os.fork()
    if worker == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the signal was asked for
            os._exit(1)
        os.setsid()
        _prefer_for_killing()
        return
    signal.signal(signal.SIGTERM, lambda *_: _end(protection))
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _close_files((*keep, *(protection.descriptors if protection else ())))
    try:
        if protection:
            protection.listen()
        status = _watch_until_end(worker, watch)
        watch()
    except BaseException:  # nobody reads what `watch` writes: the parent died before its death was asked for
        _end(protection)
    end_descendants(os.getpid(), _END_SECONDS)
    if protection:
        changes = protection.finish()
        if finish:
            finish(changes)
    _end_like(status)


def _end(protection: FileProtection | None) -> NoReturn:
    end_descendants(os.getpid(), _END_SECONDS)
    if protection:
        protection.remove()
    os._exit(128 + signal.SIGTERM)


def _watch_until_end(worker: int, watch: Callable[[], None]) -> int:
    """Collect children that ended, adopted ones too, until the worker is among them; return its status.

    SIGTERM of a process that is watched over is ignored: some scripts end whoever started them.
    """
    launcher = os.getppid()
    waited_for = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    ended = None
    while ended is None:
        watch()
        received = signal.sigtimedwait(waited_for, _WATCH_SECONDS)
        if received and received.si_signo == signal.SIGTERM and not _is_watched_over(received.si_pid, launcher):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        ended = _reap(worker)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)
    return ended


def _is_watched_over(sender: int, launcher: int) -> bool:
    """Return True if the sender of a signal descends from this process, also if it has ended since."""
    if sender in (0, launcher) or os.getppid() != launcher:  # 0 is the kernel, or a process of another namespace
        return False
    return sender in descendants(os.getpid()) or not Path(f"/proc/{sender}").exists()


def _reap(worker: int) -> int | None:
    """Collect the children that ended; return the status of the worker if it is one of them."""
    ended = None
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            if child[0] == worker:
                ended = child[1]
    return ended


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _close_files(others: Sequence[int]) -> None:
    """Close all files but some: the parent sees the end of its pipes when the worker closes them."""
    start = 0
    for descriptor in sorted(others):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, 4096)


def _prefer_for_killing() -> None:
    """Have Linux kill this process first when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def block_network() -> str:
    """Keep this process and its descendants from the network, and return how.

    A network namespace of its own has a loopback interface and no other. Where the kernel or a container refuses one,
    libseccomp denies sockets other than Unix sockets. Where that library is missing the network stays open.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    ways: tuple[tuple[str, Callable[[], bool]], ...] = ((NAMESPACE, _enter_namespace), (SECCOMP, _deny_sockets))
    for name, enter in ways:
        with suppress(OSError, AttributeError):
            if enter():
                return name
    return OPEN


def _enter_namespace() -> bool:
    enter_namespace(CLONE_NEWNET)
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    return True


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp` of seccomp.h."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("first", ctypes.c_uint64), ("second", ctypes.c_uint64))


def _deny_sockets() -> bool:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_SCMP_ACT_ALLOW)))
    deny = ctypes.c_uint32(_SCMP_ACT_ERRNO | errno.EACCES)
    not_unix = (_Comparison * 1)(_Comparison(0, _SCMP_CMP_NE, socket.AF_UNIX, 0))
    number = library.seccomp_syscall_resolve_name
    codes = [
        library.seccomp_rule_add_array(context, deny, number(b"socket"), 1, not_unix),
        library.seccomp_rule_add_array(context, deny, number(b"io_uring_setup"), 0, None),  # makes sockets, too
    ]
    codes.append(library.seccomp_load(context))
    library.seccomp_release(context)
    return not any(codes)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
