"""Scripts that do to their process what scripts do: fork, train in threads, ignore signals, end in odd ways."""

import subprocess
import sys
import time
from textwrap import dedent

import pytest

from vramcast.child import process_tree
from vramcast.simulation.scripts.child import _is_success as is_success

TRAIN = """
import os, signal, subprocess, sys, threading, time
import torch

def train(width=512, steps=3):
    model = torch.nn.Linear(width, width).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(64, width, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

"""
LARGE = "train(2048)"
LARGE_MIB = 2 * 2048 * 2048 * 4 / 2**20  # weights and gradients


@pytest.fixture
def run(tmp_path, warm_host):
    """Run a script, and return the exit code, the JSON answer where there is one, and the standard error."""

    def run(lines, *options):
        path = tmp_path / "train.py"
        path.write_text(TRAIN + dedent(lines))
        return warm_host.run_script(path, *options)

    return run


def allocated_mib(answer):
    return max(phase["allocated"] for phase in answer["run"]["phases_mib"].values())


FORKS = {
    "the child trains": "if os.fork() == 0: train(256)\nelse:\n    os.wait()\n    LARGE",
    "the child raises": "if os.fork() == 0: raise ValueError\nos.wait()\nLARGE",
    "the child exits": "if os.fork() == 0: sys.exit(7)\nassert os.waitstatus_to_exitcode(os.wait()[1]) == 7\nLARGE",
    "the child leaves": "if os.fork() == 0: os._exit(7)\nassert os.waitstatus_to_exitcode(os.wait()[1]) == 7\nLARGE",
    "the child becomes another": "if os.fork() == 0: os.execv('/bin/true', ['true'])\nassert os.wait()[1] == 0\nLARGE",
    "a grandchild outlives it": (
        "if os.fork() == 0:\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\nos.wait()\nLARGE"
    ),
}


@pytest.mark.parametrize("lines", FORKS.values(), ids=FORKS)
def test_only_the_process_that_was_started_reports(run, lines):
    code, answer, _ = run(lines.replace("LARGE", LARGE))
    assert (code, answer["run"]["ending"]) == (0, "the script ended")
    assert allocated_mib(answer) > LARGE_MIB
    forked = "a process that the script forked used the GPU: its memory is not counted"
    assert (forked in answer["run"]["assumptions"]) == ("train(256)" in lines)


def test_a_forked_process_cannot_use_a_gpu_that_its_parent_has_used(run):
    lines = """
    train()
    if os.fork() == 0:
        try:
            train()
        except RuntimeError as error:
            os._exit("Cannot re-initialize CUDA in forked subprocess" in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
    train(2048)
    """
    code, answer, _ = run(lines)
    assert code == 0 and allocated_mib(answer) > LARGE_MIB


THREADS = {
    "waited for": "thread = threading.Thread(target=train, args=(2048,)); thread.start(); thread.join()",
    "left running": "threading.Thread(target=train, args=(2048,)).start()",
    "in a pool": (
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1).submit(train, 2048).result()"
    ),
    "beside a network": (
        "def watch():\n    other = torch.nn.Linear(8, 8)\n    while True: other(torch.zeros(1, 8))\n"
        "threading.Thread(target=watch, daemon=True).start()\ntrain(2048)"
    ),
}


@pytest.mark.parametrize("lines", THREADS.values(), ids=THREADS)
def test_training_in_a_thread_is_seen(run, lines):
    code, answer, _ = run(lines)
    assert (code, answer["run"]["ending"], len(answer["run"]["steps"])) == (0, "the script ended", 3)
    assert allocated_mib(answer) > LARGE_MIB
    assert answer["run"]["steps"][2]["shapes"] == [[64, 2048]]
    assert {"forward", "backward"} <= answer["run"]["phases_mib"].keys()


def test_training_in_a_thread_may_stop_when_the_peak_has_settled(run):
    code, answer, _ = run("threading.Thread(target=train, args=(2048, 10**9)).start()\ntime.sleep(10**6)")
    assert code == 0 and answer["run"]["ending"].startswith("stopped after")


def test_the_error_of_the_thread_that_trains_is_the_error_of_the_script(run):
    lines = """
    def loop():
        train()
        {}
    threading.Thread(target=loop).start()
    """
    code, answer, _ = run(lines.format("raise ValueError('no more data')"))
    assert code == 3 and "no more data" in answer["run"]["failure"]
    code, answer, _ = run(lines.format("train(2**16)"), "--device", "rtx_3060")
    assert code == 0 and answer["run"]["ran_out_of_memory"]
    assert allocated_mib(answer) > 2 * 2**34 / 2**20


LIMITED = {
    "it ignores SIGALRM": "signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
    "it blocks all signals": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(1000)",
    "it stops itself": "os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
    "its stack is full": (
        "sys.setrecursionlimit(200)\ndef deeper():\n    while True:\n        try: deeper()\n"
        "        except RecursionError: pass\ndeeper()"
    ),
    "it catches everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "it waits for a thread": "threading.Thread(target=time.sleep, args=(1000,)).start()",
}


@pytest.mark.parametrize("lines", LIMITED.values(), ids=LIMITED)
def test_the_time_limit_holds_and_the_report_comes(run, lines):
    begin = time.monotonic()
    code, answer, _ = run(f"train(2048)\n{lines}", "--timeout", "2")
    assert (code, answer["run"]["ending"]) == (0, "stopped after 2 s, the limit (--timeout)")
    assert allocated_mib(answer) > LARGE_MIB
    assert time.monotonic() - begin < 25  # imports and the report on a busy machine


ENDINGS = {
    "it deletes its own file": ("os.remove(__file__)\nraise ValueError('gone')", 3, "ValueError: gone (at "),
    "it closes all descriptors": ("os.closerange(0, 65_536)\ntrain(256)", 0, None),
    "its own file has the number of a descriptor": (
        "os.closerange(3, 65_536)\nfiles = [open(f'{i}.txt', 'w') for i in range(40)]", 0, None
    ),
    "its exception has no text": (
        "class Odd(Exception):\n    def __str__(self): raise SystemExit(5)\n    __repr__ = __str__\nraise Odd",
        3, "Odd: (its message cannot be printed)",
    ),
    "its message is long": ("raise ValueError('x' * 300_000_000)", 3, "ValueError: xxx"),
    "it prints a lot": ("sys.stdout.write(('y' * 2**20 + '\\n') * 60)", 0, None),
    "its output is closed": ("sys.stdout.close(); sys.stderr = None", 0, None),
    "it leaves at once": ("os._exit(0)", 0, None),
    "it leaves with a code": ("os._exit(9)", 3, "it exited with code 9"),
    "it leaves from a thread": ("threading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(100)", 0, None),
    "it becomes another program": (
        "os.execv(sys.executable, [sys.executable, '-c', ''])", 3, "run the command that it starts"
    ),
    "it ends its group": ("os.killpg(0, signal.SIGTERM)\ntime.sleep(100)", 3, "SIGTERM ended it"),
    "it ends whoever started it": (
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): os.kill(os.getppid(), number)\n"
        "subprocess.run(['kill', str(os.getppid())])\ntime.sleep(0.5)", 0, None
    ),
    "warnings are errors": ("import warnings; warnings.simplefilter('error')", 0, None),
}  # fmt: skip


def test_classes_of_the_script_cannot_break_the_report(run):
    lines = """
    class Meta(type):
        def __getattribute__(self, name): raise KeyError
    class Odd(Exception, metaclass=Meta): pass
    raise Odd("odd")
    """
    code, _, err = run(lines)
    assert code == 3 and "the script failed: Odd: odd" in err


def test_an_exit_code_that_compares_equal_to_all_is_no_success():
    class Odd:
        def __eq__(self, other):
            raise KeyError

        __hash__ = None

    assert not is_success(SystemExit(Odd()))
    assert is_success(SystemExit(False)) and is_success(SystemExit()) and not is_success(SystemExit(2**70))


def test_the_report_needs_nothing_that_a_script_can_take(run):
    lines = f"""
    {LARGE}
    import json, warnings
    def refuse(*_): raise KeyError
    os.kill(os.getppid(), signal.SIGSTOP)
    os.getpid = lambda: 10**9
    json.dumps = json.loads = os.write = warnings.catch_warnings = threading._shutdown = refuse
    sys.settrace(lambda *_: None)
    sys.setprofile(lambda *_: None)
    sys.argv = None
    class Finder:
        find_spec = refuse
    sys.meta_path.insert(0, Finder())
    sys.path.clear()
    for name in [name for name in sys.modules if name.startswith(("torch", "vramcast", "warnings"))]:
        del sys.modules[name]
    """
    code, answer, _ = run(lines)
    assert (code, answer["run"]["ending"]) == (0, "the script ended")
    assert allocated_mib(answer) > LARGE_MIB


def test_signals_do_not_reach_the_report(run):
    lines = """
    train(2048)
    def raising(*_): raise ValueError("in a handler")
    signal.signal(signal.SIGALRM, raising)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try: time.sleep(5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.002)  # not before the script has left
        os._exit(0)
    """
    code, answer, _ = run(lines)
    assert code == 0 and allocated_mib(answer) > LARGE_MIB


def test_a_forked_process_that_fails_oddly_does_not_report(run):
    lines = f"""
    class Odd(Exception):
        def __str__(self): raise SystemExit(5)
    if os.fork() == 0: raise Odd
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
    class Output:
        def write(self, text): raise SystemExit
        flush = write
    if os.fork() == 0:
        sys.stdout = sys.stderr = Output()
        sys.exit("words")
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
    if os.fork() == 0: sys.exit(2**70 + 7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    {LARGE}
    """
    code, answer, _ = run(lines)
    assert code == 0 and allocated_mib(answer) > LARGE_MIB


def test_children_that_a_dying_process_passes_on_are_ended(monkeypatch):
    looks, ended, killed = iter([[2], [2, 3], [2, 3], [2, 3]]), [{2}, {2}, {2, 3}], []
    monkeypatch.setattr(process_tree, "descendants", lambda _: next(looks))  # 2 ends during the first look
    monkeypatch.setattr(process_tree, "_is_zombie", lambda pid: pid in ended[0])
    monkeypatch.setattr(process_tree.os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(process_tree.time, "sleep", lambda _: ended.pop(0))
    process_tree.end_descendants(1, 60)
    assert set(killed) == {3} and list(looks) == []


def test_a_supervisor_whose_reports_nobody_reads_ends_all():
    lines = """
    import os, subprocess, time
    from vramcast.simulation.sandbox.isolation import supervise
    reader, writer = os.pipe()
    os.close(reader)
    until = time.monotonic() + 0.5
    supervise(keep=[writer], watch=lambda: os.write(writer, b"x") if time.monotonic() > until else None)
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    time.sleep(600)
    """
    run = subprocess.run([sys.executable, "-c", dedent(lines)], stdout=subprocess.PIPE, check=False, timeout=20)
    assert process_tree._is_zombie(int(run.stdout))


def test_a_loader_may_spawn_its_processes(run):
    lines = """
    if __name__ == "__main__":
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.zeros(4, 8))
        assert len(list(DataLoader(data, num_workers=1, multiprocessing_context="spawn"))) == 4
        train(2048)
    """
    code, answer, _ = run(lines)
    assert code == 0 and allocated_mib(answer) > LARGE_MIB


@pytest.mark.parametrize(("lines", "code", "failure"), ENDINGS.values(), ids=ENDINGS)
def test_no_ending_loses_the_report(run, lines, code, failure):
    found, answer, err = run(f"{LARGE}\n{lines}")
    assert found == code and allocated_mib(answer) > LARGE_MIB
    if failure is None:
        assert answer["run"]["failure"] is None
    else:
        assert failure in answer["run"]["failure"] and len(answer["run"]["failure"]) < 5_000
        assert failure in err


def test_a_wait_for_ever_without_training_is_a_sentence_about_the_time_limit(run):
    code, answer, err = run("time.sleep(1000)", "--timeout", "1")
    assert (code, answer) == (2, None)
    assert "none ran there: raise --timeout (stopped after 1 s, the limit (--timeout))" in err


def test_a_snapshot_that_cannot_be_written_leaves_the_answer(run, tmp_path):
    code, answer, err = run(LARGE, "--snapshot", str(tmp_path))
    assert (code, answer) == (2, None) and "name a file in it" in err
    code, answer, err = run(LARGE, "--snapshot", "/dev/full/s.pickle")
    assert (code, answer) == (2, None)
    target = tmp_path / ("s" * 255)  # as long as a name may be: a file beside it has none
    code, answer, err = run(LARGE, "--snapshot", str(target))
    assert code == 0 and allocated_mib(answer) > LARGE_MIB and target.stat().st_size > 1_000
    target = tmp_path / ("s" * 256)
    code, answer, err = run(LARGE, "--snapshot", str(target))
    assert (code, answer) == (2, None) and "File name too long" in err
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))"  # as on a full disk
    for lines in (full, f"os.rmdir({str(tmp_path / 'directory')!r})"):
        (tmp_path / "directory").mkdir(exist_ok=True)
        code, answer, err = run(f"{LARGE}\n{lines}", "--snapshot", str(tmp_path / "directory" / "s"))
        assert code == 2 and allocated_mib(answer) > LARGE_MIB
        assert "expected to write all files that were asked for" in err
        assert list((tmp_path / "directory").iterdir()) == []
