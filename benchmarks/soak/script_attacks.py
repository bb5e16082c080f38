"""What scripts do to their process while they train: each attack is a few lines, and what they imply for the ending.

`script(seed)` draws a training script with some of them, and the endings that it may have.
"""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent, indent

WIDTH = 2048
KNOWN_MIB = 2 * WIDTH * WIDTH * 4 / 2**20
"""Weights and gradients of the network that each script trains: its allocated peak is not below."""
STEP = "STEP"
"""Printed to the standard error after each step of that network, where the script still has one."""
FAILED_ATTACK = "ATTACK FAILED"
SECONDS, FEW_SECONDS = 60, 8
"""Time limits, for a script that ends and for one that never does."""
_STEPS = (3, 4, 5, 6)
_MOST_ATTACKS = 5
_MANY_STEPS = 1000
_SETTLED_STEPS = 3
"""After which vramcast may stop, as the peak no longer grows."""
_TAKES_ALL, _LIMIT_MIB = "takes 3 GiB of the host", 2500

Outcome = tuple[int, bool]
"""An exit code, and whether there is a report."""


@dataclass(frozen=True)
class Attack:
    """Some lines of a script. Unless it `ends` the script, an error in it is caught, and the script goes ahead."""

    lines: str
    ends: int | None = None
    """The exit code if the script ends here and had made a step; without a step, success is a refusal (2)."""
    silent: bool = False
    """The process may die here or later, so that it reports nothing."""
    fails: bool = False
    """What follows may fail, with good reason."""
    waits: bool = False
    """Never returns: the time limit ends the script."""
    trains: bool = False
    """Trains a small network, so that there may be a report before the known network has made a step."""
    touches: str = ""
    """What the attack changes, so that attacks that depend on it may not end the script."""
    depends: str = ""
    options: tuple[str, ...] = ()
    """Of `vramcast run`."""


@dataclass(frozen=True)
class Script:
    """A script with the endings that it may have."""

    text: str
    names: tuple[str, ...]
    options: tuple[str, ...]
    seconds: int
    """The time limit."""
    waits: bool
    outcomes: frozenset[Outcome]
    has_trained: bool
    """Whether every report contains a step of the known network."""


_HEADER = """
import _thread, asyncio, atexit, builtins, concurrent.futures, contextlib, ctypes, faulthandler, fcntl, gc, io, json
import locale, logging, mmap, multiprocessing, operator, os, pathlib, pickle, random, resource, shutil, signal, socket
import subprocess, sys, tempfile, threading, time, traceback, warnings
from time import sleep
import torch
from torch.utils.data import DataLoader, TensorDataset

_write, _getpid, _format = os.write, os.getpid, traceback.format_exception_only


class Rows(torch.utils.data.Dataset):
    def __init__(self, action=None): self.action = action
    def __len__(self): return 8
    def __getitem__(self, index):
        if self.action: self.action()
        return torch.zeros(4)


def kill_self(): signal.raise_signal(signal.SIGKILL)
def raise_odd(): raise ValueError("odd")
def train_small():
    network = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()


if __name__ == "__main__":
    FIRST, SENTINELS, MARK = _getpid(), sys.argv[1], sys.argv[2]
    known = []

    def step():
        if not known:
            network = torch.nn.Linear(WIDTH, WIDTH).cuda()
            known.extend((network, torch.optim.SGD(network.parameters(), lr=0.1)))
        known[0](torch.randn(16, WIDTH, device="cuda")).sum().backward()
        known[1].step()
        known[1].zero_grad()
        say("STEP")

    def say(text):
        if _getpid() == FIRST:
            with contextlib.suppress(OSError): _write(2, f"\\n{text}\\n".encode())

    def caught(name, error):
        if _getpid() != FIRST: raise error
        say(f"ATTACK FAILED {name}: {type(error).__name__}")
"""
_CHILD = "pid = os.fork()\nif pid == 0:\n    {}\n    os._exit(0)\nos.waitpid(pid, 0)"
_SLEEP = '["sleep", "600." + MARK]'
"""A process that outlives the script, and whose command line names the run."""
_HANDLED = "signal.signal(signal.{0}, lambda *_: None)\nsignal.raise_signal(signal.{0})"
_THREAD = "thread = threading.Thread(target={})\nthread.start(); thread.join()"
_DAEMON = "threading.Thread(target={}, daemon=True).start()"


def _child(lines: str, **values: bool) -> Attack:
    return Attack(_CHILD.format(lines), **values)


_PROCESSES: Mapping[str, Attack] = {
    "a child trains": _child("train_small()"),
    "a child trains the same network": _child("step()"),
    "a child raises": _child("raise ValueError('in a child')"),
    "a child exits": _child("sys.exit(7)"),
    "a child exits with words": _child("sys.exit('words')"),
    "a child leaves": _child("os._exit(7)"),
    "a child leaves by a thread": _child("threading.Thread(target=os._exit, args=(3,)).start(); sleep(600)"),
    "a child becomes another program": _child("os.execv('/bin/true', ['true'])"),
    "a child kills itself": _child("kill_self()"),
    "a child aborts": _child("os.abort()"),
    "a child raises BaseException": _child("raise BaseException"),
    "a child runs the rest, too": Attack("os.fork()"),
    "a child runs the rest, and is waited for": Attack("pid = os.fork()\nif pid: os.waitpid(pid, 0)"),
    "a child sleeps": Attack(f"if os.fork() == 0: os.execvp('sleep', {_SLEEP})"),
    "a daemon": Attack(
        f"if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: os.execvp('sleep', {_SLEEP})\n    os._exit(0)"
    ),
    "a daemon in Python that ignores all": Attack(
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    os.closerange(0, 4096)\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n    while True: sleep(600)"
    ),
    "children in a row": Attack("for _ in range(20):\n    if os.fork() == 0: os._exit(0)"),
    "a chain of children": Attack(
        "if os.fork() == 0:\n    for _ in range(6):\n        if os.fork(): os._exit(0)\n"
        f"    os.execvp('sleep', {_SLEEP})"
    ),
    "a child in a thread": Attack(_THREAD.format("lambda: os.waitpid(os.posix_spawn('/bin/true', ['t'], {}), 0)")),
    "a fork in a thread": Attack("def fork():\n    if os.fork() == 0: os._exit(0)\n" + _THREAD.format("fork")),
    "a fork in a thread that runs on": Attack(
        "def fork():\n    if os.fork() == 0: sleep(600)\n" + _THREAD.format("fork")
    ),
    "a pool": Attack("with multiprocessing.get_context('fork').Pool(2) as pool: pool.map(abs, range(10))"),
    "a pool that stays": Attack("pool = multiprocessing.get_context('fork').Pool(2)\npool.map_async(sleep, [600] * 2)"),
    "a pool whose work raises": Attack(
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n    with contextlib.suppress(TypeError):\n"
        "        pool.map(len, [1])"
    ),
    "a spawned pool": Attack("with multiprocessing.get_context('spawn').Pool(1) as pool: pool.map(abs, range(3))"),
    "a spawned process": Attack(
        "worker = multiprocessing.get_context('spawn').Process(target=operator.neg, args=(1,))\n"
        "worker.start(); worker.join()"
    ),
    "a process that stays": Attack(
        "multiprocessing.get_context('fork').Process(target=sleep, args=(600,), daemon=True).start()"
    ),
    "a process that is waited for at the end": Attack(
        "multiprocessing.get_context('fork').Process(target=sleep, args=(600,)).start()"
    ),
    "an executor of processes": Attack(
        "with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('fork')) as pool:\n"
        "    pool.submit(abs, 1).result()"
    ),
    "an executor whose process dies": Attack(
        "pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('fork'))\n"
        "with contextlib.suppress(Exception): pool.submit(kill_self).result()"
    ),
    "a manager": Attack("manager = multiprocessing.get_context('fork').Manager()\nmanager.dict()"),
    "a queue": Attack(
        "queue = multiprocessing.get_context('fork').Queue()\n"
        "multiprocessing.get_context('fork').Process(target=queue.put, args=(1,)).start()\nqueue.get(timeout=20)"
    ),
    "loader": Attack("list(DataLoader(Rows(), batch_size=2, num_workers=2))"),
    "a loader that stays": Attack(
        "loader = DataLoader(Rows(), batch_size=2, num_workers=2, persistent_workers=True)\nnext(iter(loader))"
    ),
    "a spawned loader": Attack("list(DataLoader(Rows(), num_workers=1, multiprocessing_context='spawn'))"),
    "a loader that raises": Attack(
        "with contextlib.suppress(ValueError): list(DataLoader(Rows(raise_odd), num_workers=1))"
    ),
    "a loader whose worker dies": Attack(
        "with contextlib.suppress(RuntimeError): list(DataLoader(Rows(kill_self), num_workers=1))"
    ),
    "a loader whose worker exits": Attack(
        "with contextlib.suppress(RuntimeError): list(DataLoader(Rows(sys.exit), num_workers=1, timeout=5))"
    ),
    "a program sleeps": Attack(f"subprocess.Popen({_SLEEP})"),
    "a program in its own session": Attack(f"subprocess.Popen({_SLEEP}, start_new_session=True, env={{}})"),
    "a program with all descriptors": Attack(f"subprocess.Popen({_SLEEP}, close_fds=False)"),
    "a shell with a daemon": Attack("os.system(f'setsid sleep 600.{MARK} >/dev/null 2>&1 &')"),
    "a shell that ignores signals": Attack(
        "subprocess.Popen(['sh', '-c', f\"trap '' TERM INT HUP; sleep 600.{MARK}; :\"], start_new_session=True)"
    ),
    "a program that prints": Attack("subprocess.run([sys.executable, '-c', 'print(1)'], check=True)"),
    "a program without an environment": Attack("subprocess.run(['/bin/true'], env={}, check=True)"),
    "a pipe from a shell": Attack("os.popen('echo 1').read()"),
    "a pseudo-terminal": Attack(
        "pid, terminal = os.forkpty()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0); os.close(terminal)"
    ),
    "its own group": Attack("if os.fork() == 0:\n    os.setpgid(0, 0)\n    sleep(600)"),
    "a stopped child": Attack("if os.fork() == 0:\n    while True: signal.raise_signal(signal.SIGSTOP)"),
    "signals to whoever started it": Attack(
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1):\n"
        "    if os.getppid() > 1: os.kill(os.getppid(), number)"
    ),
    "a stop of whoever started it": Attack("if os.getppid() > 1: os.kill(os.getppid(), signal.SIGSTOP)", waits=False),
    "priority": Attack("os.nice(10); os.sched_setaffinity(0, {0})"),
}

_SIGNALS: Mapping[str, Attack] = {
    "all signals ignored": Attack(
        "for number in signal.valid_signals():\n"
        "    with contextlib.suppress(OSError): signal.signal(number, signal.SIG_IGN)",
        touches="signals",
    ),
    "all signals blocked": Attack(
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())", touches="signals"
    ),
    "all signals as Linux has them": Attack(
        "timers = {signal.SIGALRM, signal.SIGPROF, signal.SIGVTALRM}  # of another attack, which would end the script\n"
        "for number in signal.valid_signals() - {signal.SIGPIPE} - timers:\n"
        "    with contextlib.suppress(OSError): signal.signal(number, signal.SIG_DFL)",
        touches="signals",
    ),
    "all signals raise": Attack(
        "def handler(number, frame): raise ValueError(number)\n"
        "for number in signal.valid_signals() - {signal.SIGCHLD}:\n"
        "    with contextlib.suppress(OSError): signal.signal(number, handler)",
        touches="signals",
    ),
    "SIGTERM with a handler": Attack(_HANDLED.format("SIGTERM"), touches="signals"),
    "SIGHUP with a handler": Attack(_HANDLED.format("SIGHUP"), touches="signals"),
    "SIGINT with a handler": Attack(_HANDLED.format("SIGINT"), touches="signals"),
    "SIGUSR1 with a handler": Attack(_HANDLED.format("SIGUSR1")),
    "SIGSEGV with a handler": Attack("signal.signal(signal.SIGSEGV, lambda *_: None)"),
    "SIGCHLD ignored": Attack("signal.signal(signal.SIGCHLD, signal.SIG_IGN)"),
    "SIGCHLD with a handler that waits": Attack(
        "def reap(*_):\n    with contextlib.suppress(OSError):\n        while os.waitpid(-1, os.WNOHANG)[0]: pass\n"
        "signal.signal(signal.SIGCHLD, reap)"
    ),
    "a handler that raises": Attack(
        "def handler(*_): raise KeyError('handler')\nsignal.signal(signal.SIGUSR2, handler)\n"
        "with contextlib.suppress(KeyError): signal.raise_signal(signal.SIGUSR2)"
    ),
    "a timer": Attack(
        "signal.signal(signal.SIGALRM, lambda *_: None)\nsignal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)"
    ),
    "a timer of processor time": Attack(
        "signal.signal(signal.SIGPROF, lambda *_: None)\nsignal.setitimer(signal.ITIMER_PROF, 0.005, 0.005)"
    ),
    "a timer that raises": Attack(
        "def handler(*_): raise KeyError('timer')\nsignal.signal(signal.SIGALRM, handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)",
        fails=True,
    ),
    "a timer that exits": Attack(
        "def handler(*_): sys.exit(4)\nsignal.signal(signal.SIGALRM, handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.01)",
        fails=True,
    ),
    "a timer that trains": Attack(
        "def handler(*_):\n    if known: step()\n"
        "signal.signal(signal.SIGALRM, handler)\nsignal.setitimer(signal.ITIMER_REAL, 0.2)"
    ),
    "a timer that kills": Attack(
        "signal.signal(signal.SIGALRM, signal.SIG_DFL)\nsignal.setitimer(signal.ITIMER_REAL, 0.2)", silent=True
    ),
    "SIGSTOP and SIGCONT from a child": Attack(
        "if os.fork() == 0:\n    if os.getppid() == FIRST: os.kill(FIRST, signal.SIGSTOP)\n    sleep(0.3)\n"
        "    if os.getppid() == FIRST: os.kill(FIRST, signal.SIGCONT)\n    os._exit(0)"
    ),
    "SIGINT from a child, at any time": Attack(
        "if os.fork() == 0:\n    sleep(random.random() / 2)\n"
        "    if os.getppid() == FIRST: os.kill(FIRST, signal.SIGINT)\n    os._exit(0)",
        fails=True,
    ),
    "SIGTERM from a child, at any time": Attack(
        "if os.fork() == 0:\n    sleep(random.random() / 2)\n"
        "    if os.getppid() == FIRST: os.kill(FIRST, signal.SIGTERM)\n    os._exit(0)",
        fails=True,
    ),
    "a flood of signals": Attack(
        "signal.signal(signal.SIGUSR1, lambda *_: None)\nif os.fork() == 0:\n"
        "    while os.getppid() == FIRST: os.kill(FIRST, signal.SIGUSR1)\n    os._exit(0)"
    ),
    "a wake-up descriptor": Attack(
        "pair = socket.socketpair()\nfor item in pair: item.setblocking(False)\n"
        "signal.set_wakeup_fd(pair[0].fileno()); signal.siginterrupt(signal.SIGUSR1, True)"
    ),
    "faulthandler": Attack(  # which reads frames while they change, and may crash
        "faulthandler.enable(); faulthandler.dump_traceback_later(0.01, repeat=True)", silent=True
    ),
    "faulthandler that exits": Attack("faulthandler.dump_traceback_later(0.2, exit=True)", silent=True),
}

_THREADS: Mapping[str, Attack] = {
    "a thread trains": Attack(_THREAD.format("train_small"), trains=True),
    "a thread trains the same network": Attack(_THREAD.format("step"), trains=True),
    "a pool of threads": Attack("concurrent.futures.ThreadPoolExecutor(2).submit(train_small).result()", trains=True),
    "a pool of threads that stays": Attack("concurrent.futures.ThreadPoolExecutor(2).submit(sleep, 0.5)"),
    "a loop in a thread": Attack("def loop():\n    while True: pass\n" + _DAEMON.format("loop")),
    "a loop of layers in a thread": Attack(
        "def loop():\n    layer = torch.nn.Linear(8, 8)\n    while True: layer(torch.zeros(1, 8)); sleep(0.001)\n"
        + _DAEMON.format("loop")
    ),
    "a loop that trains in a thread": Attack(
        "def loop():\n    while True: train_small(); sleep(0.01)\n" + _DAEMON.format("loop"), trains=True
    ),
    "a thread that runs on": Attack("threading.Thread(target=sleep, args=(1,)).start()"),
    "a thread that raises": Attack(_THREAD.format("raise_odd")),
    "a thread that exits": Attack(_THREAD.format("sys.exit")),
    "a thread that raises BaseException": Attack("def fail(): raise BaseException\n" + _THREAD.format("fail")),
    "threads' errors raise": Attack(
        "def hook(arguments): raise OSError\nthreading.excepthook = hook\n" + _THREAD.format("raise_odd")
    ),
    "threads' errors leave": Attack("threading.excepthook = lambda arguments: None\n" + _THREAD.format("raise_odd")),
    "many threads": Attack("for _ in range(100): threading.Thread(target=sleep, args=(1,), daemon=True).start()"),
    "threads that are traced": Attack("threading.settrace(lambda *_: None); threading.setprofile(lambda *_: None)"),
    "fast switches": Attack("sys.setswitchinterval(1e-6)"),
    "slow switches": Attack("sys.setswitchinterval(2)"),
    "asyncio": Attack(
        "async def job(): await asyncio.get_running_loop().run_in_executor(None, train_small)\nasyncio.run(job())",
        trains=True,
    ),
    "a thread that is waited for at the end": Attack("threading._register_atexit(sleep, 0.2)"),
    "an exit function of threads that raises": Attack("threading._register_atexit(raise_odd)"),
    "a print in a thread": Attack("def loop():\n    while True: print('x' * 1000)\n" + _DAEMON.format("loop")),
}

_DESCRIPTORS: Mapping[str, Attack] = {
    "all above 2 closed": Attack("os.closerange(3, 256)"),
    "input closed": Attack("os.close(0)"),
    "output closed": Attack("os.close(1)"),
    "errors closed": Attack("os.close(2)"),
    "all closed": Attack("os.closerange(0, 65_536)"),
    "all closed, and files in their place": Attack(
        "os.closerange(0, 65_536)\nfiles = [os.open('/dev/null', os.O_RDWR) for _ in range(40)]"
    ),
    "all closed, and sentinels in their place": Attack(
        "os.closerange(0, 65_536)\nfiles = [os.open(SENTINELS + '/0', os.O_RDWR) for _ in range(40)]"
    ),
    "dup2 over 1 and 2": Attack("null = os.open('/dev/null', os.O_WRONLY); os.dup2(null, 1); os.dup2(null, 2)"),
    "dup2 over all": Attack(
        "null = os.open('/dev/null', os.O_RDWR)\nfor number in range(3, 80): os.dup2(null, number)"
    ),
    "lines to all": Attack(
        'line = b\'{"event": "done"}\\n{"event": "internal", "reason": "x", "traceback": ""}\\n\'\n'
        "for number in range(1, 80):\n    with contextlib.suppress(OSError): os.write(number, line)"
    ),
    "the most descriptors": Attack(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\nfiles = []\n"
        "with contextlib.suppress(OSError):\n    while True: files.append(os.open('/dev/null', os.O_RDONLY))",
        fails=True,
    ),
    "no descriptors": Attack("resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))", fails=True),
    "no file may grow": Attack("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"),
    "no process may start": Attack("resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))"),
    "limits": Attack(
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))"
    ),
    "no output": Attack("sys.stdout = None"),
    "output closed in Python": Attack("sys.stdout.close(); sys.stderr.close()"),
    "output in memory": Attack("sys.stdout = sys.stderr = io.StringIO()"),
    "output that raises": Attack(
        "class Output:\n    def write(self, text): raise RuntimeError\n    flush = write\n"
        "sys.stdout = sys.stderr = Output()"
    ),
    "output that exits": Attack(
        "class Output:\n    def write(self, text): raise SystemExit(6)\n    def flush(self): raise SystemExit(6)\n"
        "sys.stdout = sys.stderr = Output()"
    ),
    "some MB of output": Attack("sys.stdout.write(('y' * 2**16 + '\\n') * 60)"),
    "bytes of output": Attack("os.write(1, bytes(range(256)) * 300)"),
    "words that have no encoding": Attack("print('\\udcff')"),
    "a read of the input": Attack("assert sys.stdin.read() == ''"),
    "input()": Attack("with contextlib.suppress(EOFError): input()"),
    "output that does not block": Attack("os.set_blocking(1, False)\nprint('z' * 2**20)"),
    "SIGPIPE as Linux has it": Attack("signal.signal(signal.SIGPIPE, signal.SIG_DFL)"),
    "shared memory": Attack(
        "from multiprocessing import shared_memory\nshared = shared_memory.SharedMemory(create=True, size=1000)\n"
        "shared.close(); shared.unlink()"
    ),
    "logging": Attack(
        "logging.basicConfig(filename=SENTINELS + '/log', force=True); logging.error('x')\n"
        "logging.shutdown(); logging.disable()"
    ),
}

_FILES: Mapping[str, Attack] = {
    "a sentinel is deleted": Attack("os.remove(SENTINELS + '/0')"),
    "a sentinel is overwritten": Attack("open(SENTINELS + '/1', 'w').write('x')"),
    "a sentinel is cut": Attack("os.truncate(SENTINELS + '/2', 1)"),
    "a sentinel is mapped": Attack("with open(SENTINELS + '/3', 'r+b') as file: mmap.mmap(file.fileno(), 0)[0] = 7"),
    "sentinels change names": Attack("os.replace(SENTINELS + '/4', SENTINELS + '/5')"),
    "sentinels get other modes": Attack("os.chmod(SENTINELS + '/6', 0); os.utime(SENTINELS + '/7', (1, 1))"),
    "a sentinel is linked": Attack("os.link(SENTINELS + '/8', SENTINELS + '/new')\nopen(SENTINELS + '/new', 'w')"),
    "all sentinels are deleted": Attack("shutil.rmtree(SENTINELS)"),
    "a shell deletes sentinels": Attack("subprocess.run(['rm', '-rf', SENTINELS], stderr=subprocess.DEVNULL)"),
    "a child overwrites sentinels": _child("pathlib.Path(SENTINELS, '9').write_bytes(b'x')"),
    "a thread overwrites sentinels": Attack(_THREAD.format("lambda: pathlib.Path(SENTINELS, '9').write_bytes(b'x')")),
    "a checkpoint over a sentinel": Attack("torch.save({'a': torch.zeros(3)}, SENTINELS + '/10')"),
    "a checkpoint of the network": Attack("torch.save(torch.nn.Linear(4, 4).cuda().state_dict(), SENTINELS + '/10')"),
    "a directory beside sentinels": Attack("os.makedirs(SENTINELS + '/a/b/c'); open(SENTINELS + '/a/b/c/d', 'w')"),
    "its own file is deleted": Attack("os.remove(__file__)"),
    "a directory that is gone": Attack("path = tempfile.mkdtemp(); os.chdir(path); os.rmdir(path)"),
    "its own directory is gone": Attack("shutil.rmtree(os.getcwd(), ignore_errors=True)"),
    "temporary files": Attack("tempfile.mkdtemp(); files = tempfile.NamedTemporaryFile(); files.write(b'x')"),
    "no rights for new files": Attack("os.umask(0o777)"),
}

_STATE: Mapping[str, Attack] = {
    "no print": Attack("del builtins.print"),
    "no open": Attack("builtins.open = raise_odd; io.open = raise_odd"),
    "no input": Attack("del builtins.input, builtins.exit, builtins.quit, builtins.help"),
    "json.dumps replaced": Attack("json.dumps = raise_odd; json.loads = raise_odd"),
    "os.write replaced": Attack("os.write = raise_odd; os.read = raise_odd; os.close = raise_odd"),
    "os.getpid replaced": Attack("os.getpid = lambda: 10**9"),
    "os.kill replaced": Attack("os.kill = os.fork = os._exit = raise_odd", fails=True, touches="leaving"),
    "time replaced": Attack("time.time = lambda: 1.0; time.perf_counter = time.monotonic = lambda: 1.0"),
    "time raises": Attack("time.time = time.perf_counter = time.monotonic = raise_odd", fails=True),
    "sleep replaced": Attack("time.sleep = lambda seconds: None"),
    "threads replaced": Attack("threading.get_ident = lambda: 1; threading._shutdown = raise_odd"),
    "traceback replaced": Attack("traceback.extract_tb = traceback.format_exception = traceback.print_exc = raise_odd"),
    "warnings replaced": Attack("warnings.catch_warnings = warnings.simplefilter = raise_odd", fails=True),
    "warnings as errors": Attack("warnings.simplefilter('error')"),
    "no environment": Attack("os.environ.clear()"),
    "no arguments": Attack("sys.argv = None"),
    "no paths": Attack("sys.path.clear()", fails=True),  # torch imports parts of itself when they are first used
    "wrong paths": Attack("sys.path[:] = [None, 3, SENTINELS]; sys.path_importer_cache.clear()", fails=True),
    "no importers": Attack("sys.meta_path.clear(); sys.path_hooks.clear()", fails=True),
    "an importer that raises": Attack(
        "class Finder:\n    def find_spec(self, *_): raise OSError\nsys.meta_path.insert(0, Finder())", fails=True
    ),
    "no modules": Attack("sys.modules.clear()", fails=True),
    "modules of ours are gone": Attack(
        "for name in [item for item in sys.modules if item.startswith('vramcast')]: del sys.modules[name]", fails=True
    ),
    "modules of Python are gone": Attack(
        "for name in ('json', 'traceback', 'warnings'): sys.modules[name] = None", fails=True
    ),
    "another main module": Attack("sys.modules['__main__'] = os"),
    "no collection": Attack("gc.disable(); gc.freeze()"),
    "collection at all times": Attack("gc.set_threshold(20, 2, 2)"),
    "a callback of the collection raises": Attack("gc.callbacks.append(raise_odd); gc.collect()"),
    "an object that raises when it is deleted": Attack(
        "class Odd:\n    def __del__(self): raise OSError\nodd = Odd(); odd.me = odd; del odd; gc.collect()"
    ),
    "unraisable errors raise": Attack("sys.unraisablehook = raise_odd; sys.excepthook = raise_odd"),
    "a shallow stack": Attack("sys.setrecursionlimit(len(traceback.extract_stack()) + 60)", fails=True),
    "a shallow stack while it trains": Attack("sys.setrecursionlimit(len(traceback.extract_stack()) + 25)", fails=True),
    "a deep stack": Attack("sys.setrecursionlimit(10**6)"),
    "a trace": Attack("sys.settrace(lambda *_: None)"),
    "a trace that raises": Attack("def trace(*_): raise KeyError\nsys.settrace(trace)", fails=True),
    "a profile": Attack("calls = []\nsys.setprofile(lambda *event: calls.append(1))"),
    "a profile that raises": Attack("def profile(*_): raise KeyError\nsys.setprofile(profile)", fails=True),
    "an audit hook": Attack("events = []\nsys.addaudithook(lambda *event: events.append(1))"),
    "an audit hook that raises": Attack(
        "def hook(name, arguments):\n    if name in ('open', 'import'): raise KeyError\nsys.addaudithook(hook)",
        fails=True,
    ),
    "locale": Attack("locale.setlocale(locale.LC_ALL, 'C'); sys.set_int_max_str_digits(640)"),
    "exit functions": Attack("atexit.register(raise_odd); atexit.register(sleep, 600); atexit.register(os._exit, 9)"),
    "a survived lack of memory": Attack(
        "with contextlib.suppress(torch.OutOfMemoryError): torch.empty(2**45, device='cuda')", trains=True
    ),
    "a lack of host memory": Attack("with contextlib.suppress(MemoryError): bytearray(2**60)"),
    "another default device": Attack("torch.set_default_device('cuda'); torch.set_default_dtype(torch.float64)"),
    "no gradients": Attack("torch.set_grad_enabled(False)", fails=True),
    "anomalies": Attack("torch.autograd.set_detect_anomaly(True); torch.use_deterministic_algorithms(True)"),
    "threads of torch": Attack("torch.set_num_threads(1)"),
    "statistics": Attack("torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); torch.cuda.synchronize()"),
    "a name of the process": Attack("ctypes.CDLL(None).prctl(15, b'odd name', 0, 0, 0)"),
    "no dumps": Attack("ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"),
    "no signal from the parent": Attack("ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)"),
    "tensors cannot be printed": Attack("torch.Tensor.__repr__ = torch.Tensor.__str__ = raise_odd"),
    "a hook on modules raises": Attack(
        "torch.nn.modules.module.register_module_forward_hook(lambda *_: raise_odd())", fails=True
    ),
    _TAKES_ALL: Attack(
        "much = bytearray(b'x') * (3 * 2**30)\nsleep(600)", ends=2, options=("--memory-limit-mib", str(_LIMIT_MIB))
    ),
}

_ENDINGS: Mapping[str, Attack] = {
    "exit": Attack("sys.exit()", ends=0),
    "exit with 0": Attack("sys.exit(0)", ends=0),
    "exit with None": Attack("raise SystemExit(None)", ends=0),
    "exit with False": Attack("sys.exit(False)", ends=0),
    "exit with a code": Attack("sys.exit(5)", ends=3),
    "exit with a large code": Attack("sys.exit(2**70)", ends=3),
    "exit with words": Attack("sys.exit('not today')", ends=3),
    "exit with an odd object": Attack(
        "class Odd:\n    def __str__(self): raise KeyError\n    __repr__ = __eq__ = __str__\nsys.exit(Odd())", ends=3
    ),
    "quit": Attack("quit(3)", ends=3),
    "leave": Attack("os._exit(0)", ends=0, depends="leaving"),
    "leave with a code": Attack("os._exit(9)", ends=3, depends="leaving"),
    "leave with an odd code": Attack("os._exit(256)", ends=3, depends="leaving"),
    "leave from a thread": Attack(
        "threading.Thread(target=os._exit, args=(0,)).start(); sleep(600)", ends=0, depends="leaving"
    ),
    "abort": Attack("os.abort()", silent=True, ends=3),
    "SIGKILL": Attack("kill_self()", silent=True, ends=3),
    "SIGSEGV": Attack("ctypes.string_at(0)", silent=True, ends=3),
    "SIGFPE": Attack(
        "signal.signal(signal.SIGFPE, signal.SIG_DFL); signal.raise_signal(signal.SIGFPE); sleep(600)", silent=True,
        ends=3, depends="signals",
    ),
    "a stack overflow": Attack(
        "import json.decoder\nsys.setrecursionlimit(10**9)\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
        "class Deep:\n    def __repr__(self): return repr([self])\nrepr(Deep())", silent=True, ends=3,
    ),
    "an alarm": Attack(
        "signal.signal(signal.SIGALRM, signal.SIG_DFL); signal.alarm(1); sleep(600)", silent=True, ends=3,
        depends="signals",
    ),
    "no processor time": Attack(
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", silent=True, ends=3
    ),
    "SIGTERM": Attack("signal.raise_signal(signal.SIGTERM)", ends=3, depends="signals"),
    "SIGHUP of the group": Attack("os.killpg(0, signal.SIGHUP); sleep(5)", ends=3, depends="signals"),
    "SIGTERM from a child": Attack(
        "if os.fork() == 0:\n    if os.getppid() == FIRST: os.kill(FIRST, signal.SIGTERM)\n    os._exit(0)\nsleep(5)",
        ends=3, depends="signals",
    ),
    "SIGINT": Attack("signal.raise_signal(signal.SIGINT)", ends=3, depends="signals"),
    "interrupt from a thread": Attack(
        "threading.Thread(target=_thread.interrupt_main).start()\nfor _ in range(50): sleep(0.1)",
        ends=3, depends="signals",
    ),
    "an error": Attack("raise ValueError('an error')", ends=3),
    "an error without words": Attack(
        "class Odd(Exception):\n    def __str__(self): raise SystemExit(0)\n    __repr__ = __str__\nraise Odd", ends=3
    ),
    "an error with an odd class": Attack(
        "class Meta(type):\n    def __getattribute__(self, name): raise KeyError\n"
        "class Odd(Exception, metaclass=Meta): pass\nraise Odd", ends=3,
    ),
    "an error with long words": Attack("raise ValueError('x' * 10**8)", ends=3),
    "an error with odd words": Attack("raise ValueError('\\udcff\\x00\\x1b[2J' + chr(0x2028))", ends=3),
    "a BaseException": Attack("class Odd(BaseException): pass\nraise Odd", ends=3),
    "a GeneratorExit": Attack("raise GeneratorExit", ends=3),
    "a group of errors": Attack("raise ExceptionGroup('many', [ValueError(i) for i in range(1000)])", ends=3),
    "a circle of errors": Attack(
        "first, second = ValueError(1), ValueError(2)\nfirst.__cause__, second.__cause__ = second, first\nraise first",
        ends=3,
    ),
    "a chain of errors": Attack(
        "def fail(depth):\n    try:\n        if depth: fail(depth - 1)\n        raise ValueError(depth)\n"
        "    except ValueError as error: raise KeyError(depth) from error\nfail(150)", ends=3,
    ),
    "a MemoryError": Attack("bytearray(2**60)", ends=3),
    "deep recursion": Attack("def deeper(): deeper()\ndeeper()", ends=3),
    "an error in code without a file": Attack("exec('raise ValueError(1)')", ends=3),
    "wrong syntax": Attack("exec('raise raise')", ends=3),
    "no such module": Attack("import no_such_module", ends=3),
    "an assertion": Attack("assert not known and False", ends=3),
    "its file is gone, and an error": Attack("os.remove(__file__)\nraise ValueError('gone')", ends=3),
    "another program": Attack("os.execv('/bin/true', ['true'])", ends=3),
    "another program by its name": Attack(f"os.execvp('sleep', {_SLEEP})", ends=3),
    "another interpreter": Attack("os.execve(sys.executable, [sys.executable, '-c', ''], {})", ends=3),
    "more memory than the device has": Attack("torch.empty(2**45, device='cuda')", ends=0, trains=True),
    "a tensor of a wrong shape": Attack("torch.zeros(3, device='cuda') @ torch.zeros(4, device='cuda')", ends=3),
    "a wrong argument of torch": Attack("torch.nn.Linear('x', 3)", ends=3),
}  # fmt: skip

_WAITS: Mapping[str, Attack] = {
    "a loop": Attack("while True: pass", waits=True),
    "a sleep": Attack("sleep(10**6)", waits=True),
    "a sleep with all signals blocked": Attack(
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); sleep(10**6)", waits=True
    ),
    "SIGSTOP": Attack("signal.raise_signal(signal.SIGSTOP)\nwhile True: sleep(1)", waits=True),
    "a loop that catches all": Attack(
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass", waits=True
    ),
    "a full stack": Attack(
        "def deeper():\n    while True:\n        try: deeper()\n        except RecursionError: pass\ndeeper()",
        waits=True,
    ),
    "a wait for a thread": Attack("threading.Thread(target=sleep, args=(10**6,)).start(); sleep(10**6)", waits=True),
    "a wait for a child": Attack(f"subprocess.run({_SLEEP})", waits=True),
    "a deadlock": Attack("lock = threading.Lock(); lock.acquire(); lock.acquire()", waits=True),
    "a read that waits": Attack("os.read(os.pipe()[0], 1)", waits=True),
}

ATTACKS: Mapping[str, Attack] = {
    **_PROCESSES, **_SIGNALS, **_THREADS, **_DESCRIPTORS, **_FILES, **_STATE, **_ENDINGS, **_WAITS
}  # fmt: skip


def script(seed: int) -> Script:
    """Return the script of a seed: every second one has one attack, until each had its turn; others have up to five."""
    draw = random.Random(f"script {seed}")
    steps = draw.choice(_STEPS)
    turn, is_odd = divmod(seed, 2)
    if turn < len(ATTACKS) and not is_odd:
        names = [random.Random(0).sample(list(ATTACKS), len(ATTACKS))[turn]]
        places = [draw.choice((0, 1, steps))]
    else:
        passing = [name for name, item in ATTACKS.items() if item.ends is None and not item.waits]
        names = draw.sample(passing, draw.randint(1, _MOST_ATTACKS))
        if draw.random() < 0.5:
            names[-1] = draw.choice(list(_ENDINGS if draw.random() < 0.9 else _WAITS))
        places = sorted(draw.randint(0, steps) for _ in names)
    settles = draw.random() < 0.25
    return assembled(names, places, steps, settles=settles)


def assembled(names: Sequence[str], places: Sequence[int], steps: int, *, settles: bool = False) -> Script:
    """Return a script with attacks before some of its steps; `settles` leaves the number of steps to vramcast."""
    course: list[str] = []
    for number in range(steps + 1):
        course += [name for name, place in zip(names, places, strict=True) if place == number]
        course += [STEP] if number < steps else []
    attacks = [ATTACKS[name] for name in names]
    waits = any(item.waits for item in attacks)
    options = [word for item in attacks for word in item.options]
    if not settles:
        options += ["--steps", str(_MANY_STEPS)]
    text = _HEADER.replace("WIDTH", str(WIDTH)) + indent("\n".join(_lines(course)), "    ") + "\n"
    outcomes, has_trained = _outcomes(course, settles)
    seconds = FEW_SECONDS if waits else SECONDS
    return Script(text, tuple(names), tuple(options), seconds, waits, frozenset(outcomes), has_trained)


def _lines(course: Sequence[str]) -> Iterator[str]:
    for name in course:
        if name == STEP:
            yield "step()"
        elif ATTACKS[name].ends is not None or ATTACKS[name].waits:
            yield dedent(ATTACKS[name].lines)
        else:
            yield f"try:\n{indent(ATTACKS[name].lines, '    ')}\nexcept Exception as error: caught({name!r}, error)"


def _outcomes(course: Sequence[str], settles: bool) -> tuple[set[Outcome], bool]:
    """Return the endings that a script may have, and whether each report contains a step of the known network."""
    outcomes: set[Outcome] = set()
    steps, small, has_trained = 0, False, True
    touched: set[str] = set()
    for name in course:
        if name == STEP:
            steps += 1
            outcomes |= {(0, True)} if settles and steps > _SETTLED_STEPS else set()
            continue
        item = ATTACKS[name]
        small = small or item.trains
        reports = {True} if steps else {False, True} if small or item.fails else {False}
        touched.add(item.touches)
        if item.fails:
            outcomes |= {(3, reported) for reported in reports}
            outcomes |= {(2, False)} if not steps else set()
            has_trained = has_trained and steps > 0
        if item.silent:
            outcomes.add((3, False))
        if item.ends is not None or item.waits:
            if not item.silent:
                code = item.ends or 0
                outcomes |= {(code if reported or code else 2, reported and code != 2) for reported in reports}
                has_trained = has_trained and steps > 0
            if not item.depends or item.depends not in touched:
                return outcomes, has_trained
    return {*outcomes, (0, True)}, has_trained


if __name__ == "__main__":
    print(script(int(sys.argv[1])).text)
