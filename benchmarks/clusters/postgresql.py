"""A PostgreSQL server in a temporary folder, on a free port of loopback, which tests and benchmarks kill and start."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg

_USER = "postgres"
"""PostgreSQL does not run as root."""


def binaries() -> Path | None:
    """Return the newest folder with initdb; None if PostgreSQL is not installed."""
    initdb = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    return Path(initdb).resolve().parent if initdb else folders[-1] if folders else None


def missing() -> str | None:
    """Return why no server can be started here; None if it can."""
    if binaries() is None:
        return "needs PostgreSQL: apt-get install postgresql"
    if os.getuid() == 0:
        try:
            pwd.getpwnam(_USER)
        except KeyError:
            return f"needs a user {_USER}: PostgreSQL does not run as root"
    return None


class Server:
    """A server that tests stop, kill and start again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://{_USER}@127.0.0.1:{self.port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None
        account = pwd.getpwnam(_USER) if os.getuid() == 0 else None
        self._account = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
        if account:
            os.chown(folder, account.pw_uid, account.pw_gid)
        self._run("initdb", "--no-sync", "--auth=trust", f"--username={_USER}", f"--pgdata={folder}/data")

    def _command(self, name: str, *words: str) -> list[str]:
        return [f"{binaries()}/{name}", *words]

    def _run(self, name: str, *words: str) -> None:
        command = self._command(name, *words)
        subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=self.folder, **self._account)  # type: ignore[call-overload]

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "50",
            "fsync": "off",  # what is killed is its processes, not the kernel
        }
        words = [f"-c{key}={value}" for key, value in options.items()]
        command = self._command("postgres", "-D", f"{self.folder}/data", "-p", str(self.port), *words)
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(  # type: ignore[call-overload]
            command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True, **self._account
        )
        log.close()
        for _ in range(300):
            with suppress(psycopg.OperationalError), psycopg.connect(self.url, connect_timeout=2):
                return
            time.sleep(0.05)
        raise RuntimeError((self.folder / "log").read_text(encoding="utf-8")[-2000:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes, which have groups of their own."""
        if self._process is None:
            return
        for pid in (self._process.pid, *_children(self._process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            self._process.wait(30)
            self._process = None

    def clear(self) -> None:
        """Remove all tables."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")


def _children(parent: int) -> list[int]:
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(words[1]) == parent:
                children.append(int(path.parent.name))
    return children


@contextmanager
def postgresql(folder: Path) -> Iterator[Server]:
    """Yield a running server, and leave no process behind."""
    server = Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.signal(signal.SIGCONT)
        server.signal(signal.SIGKILL)
