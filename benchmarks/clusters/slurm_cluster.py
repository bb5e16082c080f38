"""A Slurm cluster of one node with two fake GPUs, in a temporary folder, on free ports of 127.0.0.1."""

import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.running_service import RunningService, running_service

PLUGIN = Path(__file__).parents[2] / "deploy" / "slurm" / "vramcast.lua"
GPU_SHARDS = 40
"""Shards of each of the two GPUs: one for each GiB of an A100."""
MARK = "VRAMCAST_LIVE_SLURM"
"""A variable in the environment of all processes of a cluster, by which those left behind are found."""
USER = "nobody"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "curl", "setpriv", "unshare")
_CONFIGURATION = """\
ClusterName=live
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
SlurmctldDebug=debug
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
GresTypes=gpu,shard,disk
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 Gres=gpu:2,shard:{node_shards},disk:1
PartitionName=main Nodes=ALL Default=YES
"""
_GRES = """\
Name=gpu File={folder}/gpu[0-1]
Name=shard Count={node_shards}
Name=disk Count=1
"""


def reason_to_skip() -> str | None:
    """Return why no cluster can be started here; None if it can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "needs root on Linux, to start slurmctld and to submit as another user"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge curl"
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        return "needs mount namespaces, to give slurmd a /run of its own"
    return None


@dataclass
class Submission:
    """The output and the exit code that a user saw at the submission of a job."""

    status: int
    text: str
    seconds: float

    @property
    def job(self) -> int:
        """The number of the job."""
        match = re.search(r"batch job (\d+)", self.text)
        assert match, f"no job was submitted: {self.text}"
        return int(match[1])


@dataclass
class Cluster:
    """Running daemons, and the commands of an unprivileged user."""

    folder: Path
    service: RunningService
    token: str
    environment: Mapping[str, str]
    daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, name: str, *words: str, configuration: bool = True) -> None:
        """Start a daemon in the foreground, so that it can be ended."""
        environment = {key: text for key, text in self.environment.items() if configuration or key != "SLURM_CONF"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def stop(self, name: str) -> None:
        """End a daemon."""
        process = self.daemons.pop(name)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()

    def start_controller(self, configuration: str = "both") -> None:
        """Start slurmctld with one of the configurations, and wait until its node is idle."""
        self.start("slurmctld", "slurmctld", "-D", "-i", "-f", f"{self.folder}/{configuration}/slurm.conf")
        self.wait(lambda: "is UP" in self.root("scontrol", "ping"), "slurmctld", 30)
        if "slurmd" not in self.daemons:
            self.start_node()
        self.wait(lambda: "idle" in self.root("sinfo", "-h", "-o", "%T"), "an idle node", 60)

    def start_node(self) -> None:
        """Start slurmd without files, which slurmctld sends: in a /run of its own, where it looks for munged."""
        port = re.findall(r"SlurmctldPort=(\d+)", (self.folder / "both" / "slurm.conf").read_text("utf-8"))[0]
        own_run = (
            "mount -t tmpfs none /run && mkdir /run/munge && "
            f"ln -s {self.folder}/munge/socket /run/munge/munge.socket.2 && "
            f"exec slurmd -D --conf-server 127.0.0.1:{port}"
        )
        self.start("slurmd", "unshare", "--mount", "sh", "-c", own_run, configuration=False)

    def root(self, *words: str) -> str:
        """Return the output of a command of the operator."""
        done = subprocess.run(
            words, capture_output=True, text=True, env=dict(self.environment), timeout=30, check=False
        )
        return done.stdout

    def submit(self, script: Path, *options: str, plugins: str = "both", token: bool = True) -> Submission:
        """Submit a script as an unprivileged user, whose sbatch reads the configuration of a folder."""
        environment = {**self.environment, "SLURM_CONF": f"{self.folder}/{plugins}/slurm.conf"}
        if token:
            environment["VRAMCAST_TOKEN"] = self.token
        user = ["setpriv", f"--reuid={USER}", f"--regid={pwd.getpwnam(USER).pw_gid}", "--clear-groups"]
        words = [*user, "sbatch", "-o", f"{self.folder}/output/%j", *options, str(script)]
        start = time.perf_counter()
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, cwd="/", env=environment,
            check=False,
        )  # fmt: skip
        return Submission(done.returncode, done.stdout, time.perf_counter() - start)

    def script(self, name: str, job: str | None, command: str = "sleep 1") -> Path:
        """Write a job script."""
        path = self.folder / f"{name}.sh"
        mark = f"#VRAMCAST {job}\n" if job else ""
        path.write_text(f"#!/bin/bash\n{mark}{command}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def shown(self, job: int) -> str:
        """Return how slurmctld sees a job."""
        return self.root("scontrol", "-d", "show", "job", str(job))

    def requests(self, submission: Submission) -> str:
        """Return the resources that slurmctld stored for a job, as `NAME=VALUE` lines."""
        return "\n".join(re.findall(r"Tres(?:Per\w+)=\S+", self.shown(submission.job))).replace("gres/", "gres:")

    def allocated(self, submission: Submission) -> str:
        """Return the shards and GPUs that a job got, once it has started."""
        states = ("JobState=RUNNING", "JobState=COMPLETED")
        self.wait(lambda: any(item in self.shown(submission.job) for item in states), "a running job", 20)
        return ",".join(re.findall(r"JOB_GRES=((?:shard|gpu)\S*)", self.shown(submission.job)))

    def output(self, submission: Submission) -> str:
        """Return what a job wrote, once it has ended."""
        self.wait(lambda: "JobState=COMPLETED" in self.shown(submission.job), f"the end of job {submission.job}", 40)
        return (self.folder / "output" / str(submission.job)).read_text(encoding="utf-8")

    def clear(self) -> None:
        """Cancel all jobs, and wait until the node is idle."""
        self.root("scancel", "--user", USER)
        self.wait(lambda: not self.root("squeue", "-h").strip(), "an empty queue", 40)

    def set(self, name: str, value: str) -> None:
        """Change a setting of the installed plugins."""
        for path in (self.folder / "both").glob("*.lua"):
            text, count = re.subn(rf"(?m)^    {name} = [^,]*,", f"    {name} = {value},", path.read_text("utf-8"))
            assert count == 1, f"{path.name} has no setting {name}"
            new = path.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(path)
            moment = time.time() + 5  # slurmctld compares whole seconds
            os.utime(path, (moment, moment))

    def log(self) -> str:
        """Return the log of slurmctld."""
        return (self.folder / "slurmctld.log").read_text(encoding="utf-8", errors="replace")

    @staticmethod
    def wait(done: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait for something."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"expected {what} within {seconds} s"
            time.sleep(0.1)

    @contextmanager
    def hung_service(self) -> Iterator[None]:
        """Stop the service without closing its port."""
        self.service.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.service.process.send_signal(signal.SIGCONT)


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a service with a token and a cluster, and end all of their processes."""
    folder = Path(tempfile.mkdtemp(prefix="vramcast-slurm-"))
    folder.chmod(0o755)
    token = secrets.token_hex(16)
    _secret(folder / "token", token)
    try:
        with running_service(folder / "service.log", "--token-file", f"{folder}/token") as service:
            cluster = Cluster(folder, service, token, _environment(folder))
            try:
                _configure(cluster)
                cluster.start("munged", "munged", "--foreground", "--force", *_munge_options(folder))
                cluster.wait((folder / "munge" / "socket").exists, "munged", 20)
                cluster.start_controller()
                yield cluster
            finally:
                _end(cluster)
    finally:
        shutil.rmtree(folder)


def _environment(folder: Path) -> Mapping[str, str]:
    return {
        "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin",
        "SLURM_CONF": f"{folder}/both/slurm.conf",
        "LC_ALL": "C.UTF-8",
        MARK: str(folder),
    }


def _secret(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _munge_options(folder: Path) -> list[str]:
    inside = folder / "munge"
    return [
        f"--socket={inside}/socket", f"--key-file={inside}/key", f"--pid-file={inside}/pid",
        f"--log-file={inside}/log", f"--seed-file={inside}/seed",
    ]  # fmt: skip


def _configure(cluster: Cluster) -> None:
    """Write the configurations: of both plugins, and of each alone."""
    folder = cluster.folder
    for name in ("munge", "state", "spool", "output", "both", "job_submit", "cli_filter"):
        (folder / name).mkdir()
    (folder / "output").chmod(0o777)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    for index in range(2):
        (folder / f"gpu{index}").touch()
    values: dict[str, Any] = {
        "folder": folder, "host": socket.gethostname().partition(".")[0], "controller_port": free_port(),
        "node_port": free_port(), "node_shards": 2 * GPU_SHARDS,
    }  # fmt: skip
    lines = {"job_submit": "JobSubmitPlugins=lua\n", "cli_filter": "CliFilterPlugins=lua\n"}
    for name, plugins in {"both": "".join(lines.values()), **lines}.items():
        (folder / name / "slurm.conf").write_text(_CONFIGURATION.format(**values) + plugins, encoding="utf-8")
        (folder / name / "gres.conf").write_text(_GRES.format(**values), encoding="utf-8")
    plugin = PLUGIN.read_text(encoding="utf-8")
    for name in lines:
        (folder / "both" / f"{name}.lua").write_text(plugin, encoding="utf-8")
    cluster.set("service", f'"http://127.0.0.1:{cluster.service.port}"')
    cluster.set("token_file", f'"{folder}/token"')
    for name in lines:
        shutil.copy(folder / "both" / f"{name}.lua", folder / name)


def _end(cluster: Cluster) -> None:
    with suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.clear()
    for name in list(cluster.daemons):
        cluster.stop(name)
    for process in left_behind(cluster.folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    cluster.wait(lambda: not left_behind(cluster.folder), "the end of all processes", 10)


def left_behind(folder: Path) -> list[int]:
    """Return the processes whose environment names the cluster's folder."""
    mark, processes = f"{MARK}={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                processes.append(int(path.parent.name))
    return processes
