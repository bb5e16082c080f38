"""Attacks on the process that runs a user's code: network, environment, memory, daemons, long messages."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from vramcast.child.process import TICK_SECONDS, Child
from vramcast.child.process_tree import descendants, memory_bytes
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.sandbox.client import ChildSimulator
from vramcast.simulation.sandbox.failures import NetworkError
from vramcast.simulation.sandbox.isolation import NAMESPACE, OPEN, SECCOMP, SUPERVISOR_SECONDS, clean_environment
from vramcast.virtual_gpu.allocator.sizes import MIB

CHECKOUT = str(Path(__file__).resolve().parent.parent)
HEAD = """
import os, sys, time, json, signal
sys.path.insert(0, CHECKOUT)
from vramcast.simulation.sandbox import isolation
def report(**values):
    os.write(int(sys.argv[-1]), json.dumps({"event": "said", **values}).encode() + b"\\n")
"""
DAEMON = """
isolation.supervise()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        report(daemon=os.getpid())
        time.sleep(600)
    os._exit(0)
os.wait()
"""


@pytest.fixture
def started():
    """Start children that run some lines of Python, and end them."""
    children = []

    def start(lines):
        text = HEAD.replace("CHECKOUT", repr(CHECKOUT)) + lines
        children.append(Child([sys.executable, "-c", text], dict(os.environ), 2**27))
        return children[-1]

    yield start
    for child in children:
        if child.process.returncode is None:
            child.end()


def first_report(child, seconds=20.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for report in child.messages(TICK_SECONDS):
            return report
    return pytest.fail(f"no report: {child.fault} {child.last_output}")


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def names_of_processes():
    names = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            names.append(path.read_text().strip())
    return names


def eventually(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@contextmanager
def socket_server():
    """Listen on loopback, which the child would reach if nothing kept it from the network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


def test_secrets_and_unknown_variables_are_not_passed_on():
    given = {
        "PATH": "/bin", "HOME": "/home/x", "PYTHONPATH": "/lib", "HF_HOME": "/cache", "LC_ALL": "C", "PYTORCH_JIT": "0",
        "VRAMCAST_TOKEN": "s", "HF_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "s", "PYTHON_API_KEY": "s",
        "SSH_AUTH_SOCK": "/s", "HTTPS_PROXY": "http://u:p@proxy", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    clean = clean_environment(given)
    assert {name for name in given if name in clean} == {
        "PATH", "HOME", "PYTHONPATH", "HF_HOME", "LC_ALL", "PYTORCH_JIT", "CUDA_VISIBLE_DEVICES"
    }  # fmt: skip
    assert clean["CUDA_VISIBLE_DEVICES"] == ""
    assert clean["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in clean_environment(given, allow_network=True)


PROBE = """
import encodings.idna, socket
PREPARE
way = isolation.block_network()
def attempt(address):
    try:
        socket.create_connection(address, 5).close()
        return "connected"
    except OSError as error:
        return type(error).__name__
report(way=way, reached=attempt(ADDRESS), unix=len(socket.socketpair()), user=os.getuid())
"""


@pytest.mark.parametrize("way", [NAMESPACE, SECCOMP, "unprivileged"])
def test_the_network_cannot_be_reached(started, way):
    with socket_server() as address:
        prepare = {
            NAMESPACE: "",
            SECCOMP: "isolation._enter_namespace = lambda: False",
            "unprivileged": "os.geteuid() or (os.setgid(65534), os.setuid(65534))",
        }[way]
        found = first_report(started(PROBE.replace("PREPARE", prepare).replace("ADDRESS", repr(address))))
    if found["way"] == OPEN:
        pytest.skip("neither a network namespace nor libseccomp can be used here")
    assert found["reached"] != "connected"
    assert found["unix"] == 2
    if way == "unprivileged" and os.geteuid() == 0:
        assert found["user"] == 65534


def test_a_daemon_that_forked_twice_is_ended_with_its_worker(started):
    daemon = first_report(started(DAEMON))["daemon"]
    assert eventually(lambda: not lives(daemon))


@pytest.mark.parametrize("last", ["time.sleep(600)", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
def test_a_daemon_that_forked_twice_is_ended_with_the_child(started, last):
    child = started(f"{DAEMON}\n{last}")
    daemon = first_report(child)["daemon"]
    assert daemon in descendants(child.process.pid)
    child.end()
    assert not lives(daemon)


def test_all_end_when_the_parent_is_killed(tmp_path):
    text = HEAD.replace("CHECKOUT", repr(CHECKOUT)) + DAEMON.replace("report(", "print(dict(") .replace(
        "os.getpid())", "os.getpid()), flush=True)") + "time.sleep(600)"  # fmt: skip
    (tmp_path / "child.py").write_text(text)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1]])",
            tmp_path / "child.py",
        ],
        stdout=subprocess.PIPE,
    )
    daemon = json.loads(parent.stdout.readline().replace(b"'", b'"'))["daemon"]
    everyone = descendants(parent.pid)
    assert daemon in everyone
    parent.kill()
    parent.wait()
    assert eventually(lambda: not any(map(lives, everyone)))


SLOW_TO_REMOVE = """
from pathlib import Path
from vramcast.simulation.sandbox.file_protection import protection
protection._LASTING = Path(SCRATCH)
remove = protection._remove_tree
def slowly(top):
    time.sleep(1.5)  # longer than other children get
    remove(top)
protection._remove_tree = slowly
files = protection.FileProtection()
isolation.supervise(files)
files.enter()
report(event="ready")
time.sleep(600)
"""


def test_a_supervisor_has_the_time_to_remove_the_scratch_directory(tmp_path):
    text = HEAD.replace("CHECKOUT", repr(CHECKOUT)) + SLOW_TO_REMOVE.replace("SCRATCH", repr(str(tmp_path)))
    child = Child([sys.executable, "-c", text], dict(os.environ), 2**27, term_seconds=SUPERVISOR_SECONDS)
    assert first_report(child)["event"] == "ready" and list(tmp_path.iterdir())
    child.end()
    assert not list(tmp_path.iterdir())


def test_a_supervised_child_ends_as_its_worker_did(started):
    for last, code in (
        ("sys.exit(7)", 7),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ):
        child = started(f"isolation.supervise()\n{last}")
        assert eventually(child.has_ended)
        child.end()
        assert child.process.returncode == code


def test_memory_counts_all_descendants_and_shared_pages_once(started):
    child = started(
        "isolation.supervise()\nshared = b'x' * 2**26\n"
        "for _ in range(3):\n    if os.fork() == 0:\n        own = b'y' * 2**26\n        time.sleep(600)\n"
        "time.sleep(1)\nreport()\ntime.sleep(600)"
    )
    first_report(child)
    pids = descendants(child.process.pid)
    assert len(pids) == 4
    assert memory_bytes(pids, 10**12) > 420 * MIB  # the sum of resident sets
    assert 250 * MIB < memory_bytes(pids, 100 * MIB) < 400 * MIB


def test_a_long_report_is_read_in_time_and_an_unbounded_one_is_a_fault(started):
    begin = time.monotonic()
    assert len(first_report(started("report(text='x' * 50_000_000)"), 30)["text"]) == 50_000_000
    child = started("while True: os.write(int(sys.argv[-1]), b'x' * 2**16)")
    while child.fault is None and time.monotonic() - begin < 30:
        assert child.messages(TICK_SECONDS) == []
    assert "over 134217728 bytes" in child.fault


def test_a_child_that_reads_nothing_holds_nobody_up(started):
    child = started("report()\ntime.sleep(600)")
    begin = time.monotonic()
    child.send({"text": "x" * 2**20})
    first_report(child)
    child.end()
    assert time.monotonic() - begin < 10


def test_a_large_request_arrives_whole(started):
    child = started("time.sleep(0.5)\nline = sys.stdin.buffer.readline()\nreport(size=len(line))")
    child.send({"text": "x" * 2**20})
    assert first_report(child)["size"] == 2**20 + len('{"text": ""}\n')


ATTACKS = """
import os, socket, sys, time
from torch import nn

def _daemon(name):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open("/proc/self/comm", "w").write(name)
            os.write(writing, b"named")
            time.sleep(600)
        os._exit(0)
    os.read(reading, 5)

def secrets():
    raise ValueError(sorted(name for name in os.environ if "SECRET" in name or "TOKEN" in name or name == "COLOUR"))

def reaches(port):
    socket.create_connection(("127.0.0.1", port), 5).close()
    return nn.Linear(4, 2)

def forks_and_returns():
    os.fork()
    return nn.Linear(4, 2)

def leaves_a_daemon(name):
    _daemon(name)
    return nn.Linear(4, 2)

def feeds_children():
    for _ in range(4):
        if os.fork() == 0:
            own = bytes(range(256)) * 2**20
            time.sleep(600)
    time.sleep(600)

def says_a_lot():
    raise ValueError("x" * 50_000_000)

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def says_nothing():
    raise Unprintable

def prints_without_end():
    while True:
        print("x" * 65536)

def closes_everything():
    os.closerange(0, 256)
    time.sleep(600)
"""


@pytest.fixture
def simulate(tmp_path):
    """Build and simulate an attack's network in a child process."""
    (tmp_path / "attacks.py").write_text(ATTACKS)

    def run(name, *limits, python=None, arguments=None, **options):
        target = parse_target(f"{tmp_path / 'attacks.py'}:{name}")
        request = BuildRequest(
            target=target, inputs=("4",), directory=str(tmp_path), python=python, arguments=arguments or {}
        )
        with ChildSimulator(request, *limits, **options) as child:
            return child.simulate({"batch_size": 2}, [load_profile("a100_40gb")])

    return run


def test_user_code_sees_no_secret(simulate, monkeypatch):
    monkeypatch.setenv("VRAMCAST_TOKEN", "s")
    monkeypatch.setenv("COLOUR", "red")
    with pytest.raises(NetworkError, match=r"ValueError: \[\]"):
        simulate("secrets")
    with pytest.raises(NetworkError, match=r"ValueError: \['COLOUR'\]"):
        simulate("secrets", environment={"COLOUR": "red"})


def test_user_code_reaches_the_network_only_where_it_is_allowed(simulate):
    with socket_server() as (_, port):
        assert simulate("reaches", arguments={"port": port}, allow_network=True).family == "module"
        with pytest.raises(NetworkError, match=r"refused|denied|unreachable"):
            simulate("reaches", arguments={"port": port})


def test_user_code_that_forks_and_returns_is_answered_once(simulate):
    assert simulate("forks_and_returns", 60).family == "module"


def test_a_daemon_of_user_code_is_ended(simulate):
    name = f"daemon-{os.getpid()}"
    assert simulate("leaves_a_daemon", 60, arguments={"name": name}).family == "module"
    assert eventually(lambda: name not in names_of_processes())


def test_the_memory_limit_counts_the_children_of_user_code(simulate):
    begin = time.monotonic()
    with pytest.raises(UserError, match="in 900 MiB"):
        simulate("feeds_children", 120, 900)
    assert time.monotonic() - begin < 60


def test_a_long_message_is_shortened(simulate):
    with pytest.raises(NetworkError) as caught:
        simulate("says_a_lot", 60)
    assert 1000 < len(str(caught.value)) < 10_000
    assert len(caught.value.traceback) < 30_000


def test_an_exception_without_a_text_is_reported(simulate):
    with pytest.raises(NetworkError, match=r"Unprintable: \(its message cannot be printed\)"):
        simulate("says_nothing", 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prints_without_end", "closes_everything"])
def test_code_that_never_answers_is_ended_in_time(simulate, name):
    begin = time.monotonic()
    with pytest.raises((UserError, NetworkError)):
        simulate(name, 8)
    assert time.monotonic() - begin < 25


@pytest.mark.usefixtures("simulate")
def test_a_network_that_cannot_be_built_gives_the_same_error_again(tmp_path):
    target = parse_target(f"{tmp_path / 'attacks.py'}:secrets")
    with ChildSimulator(BuildRequest(target=target, inputs=("4",), directory=str(tmp_path))) as child:
        for _ in range(2):
            with pytest.raises(NetworkError, match="ValueError"):
                child.simulate({"batch_size": 2}, [])
        assert child.alive
