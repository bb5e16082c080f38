"""A fake child of a measurement: `python fake_child.py MODE FD`.

It writes the memory that it holds to the file that the stub of NVML reads.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MIB = 2**20
CONTEXT, PEAK = 400 * MIB, 1000 * MIB
OK = {"event": "result", "status": "ok", "requested_bytes": 1, "allocated_bytes": 2, "reserved_bytes": 500 * MIB}
OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def hold(used, pid=None):
    """Hold memory on the GPU while this process runs, under its own process id or another."""
    path, uuid = Path(os.environ["NVML_STUB"]), os.environ["CUDA_VISIBLE_DEVICES"]
    mine = f"process {uuid} {pid or os.getpid()} "
    lines = [line for line in path.read_text().splitlines() if not line.startswith(mine)]
    lines += [f"{mine}{used} c {os.getpid()}"] if used else []
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.rename(path)


class Child:
    def __init__(self, fd):
        self.fd = fd
        self.request = json.loads(sys.stdin.readline())

    def report(self, event):
        os.write(self.fd, json.dumps(event).encode() + b"\n")

    def context(self, **more):
        self.report({"event": "context", "uuid": os.environ["CUDA_VISIBLE_DEVICES"].removeprefix("GPU-"), **more})
        assert json.loads(sys.stdin.readline()) == {"do": "go"}

    def start(self):
        hold(CONTEXT)
        self.context()

    def ok(self):
        """Create a context, hold a peak for 60 ms, and end; also print to the standard output."""
        print("output of a library", flush=True)
        self.start()
        hold(PEAK)
        time.sleep(0.06)
        hold(CONTEXT)
        self.report({**OK, "versions": {"cuda": "12.4"}})

    def capped(self):
        """Need 500 MiB: run out of memory under a lower cap."""
        self.start()
        cap = self.request["cap_bytes"]
        if cap is not None and cap < OK["reserved_bytes"]:
            self.report({"event": "result", "status": "oom", "evidence": OOM})
        else:
            self.report({**OK, "retries": int(cap == OK["reserved_bytes"])})

    def recorded(self):
        """Report the measurement in a file beside the state of the stub."""
        values = json.loads(Path(os.environ["NVML_STUB"]).with_name("figures.json").read_text())
        hold(values["breakdown"]["context"])
        self.context()
        hold(values["device_used_bytes"])
        time.sleep(0.1)
        names = ("status", "evidence", "requested_bytes", "allocated_bytes", "reserved_bytes")
        self.report({"event": "result", **{name: values[name] for name in names}})

    def hang(self):
        """Hang with a child of its own; both ignore SIGTERM and print their process ids."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.start()
        hold(PEAK)
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(f"pids {os.getpid()} {other.pid}", file=sys.stderr, flush=True)
        time.sleep(60)

    def polite_hang(self):
        """Hang, and exit on SIGTERM."""

        def leave(*_):
            print("told to end", file=sys.stderr, flush=True)
            sys.exit(1)

        signal.signal(signal.SIGTERM, leave)
        self.start()
        time.sleep(60)

    def leave_another(self):
        """Finish, and leave a process behind that holds its pipes."""
        other = subprocess.Popen(["sleep", "60"], pass_fds=(self.fd,))
        self.start()
        self.report({**OK, "versions": {"other": str(other.pid)}})

    def killed(self):
        self.start()
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_early(self):
        print("ImportError: libcudart.so.12", file=sys.stderr)
        sys.exit(7)

    def flood(self):
        """Print ten million bytes, and then a line that matters."""
        self.start()
        for _ in range(10_000):
            sys.stderr.write("x" * 999 + "\n")
        print("the last line", file=sys.stderr, flush=True)
        sys.exit(5)

    def flood_and_finish(self):
        self.start()
        for _ in range(10_000):
            sys.stderr.write("x" * 999 + "\n")
        self.report(OK)

    def garbage(self):
        os.write(self.fd, b"\xff\x00 not json\n")
        time.sleep(60)

    def endless(self):
        while True:
            os.write(self.fd, b"1" * 65_536)

    def not_a_result(self):
        self.start()
        self.report({**OK, "reserved_bytes": "much"})

    def unknown_status(self):
        self.start()
        self.report({**OK, "status": "fine"})

    def oom(self):
        self.start()
        hold(PEAK)
        time.sleep(0.05)
        self.report({"event": "result", "status": "oom", "reserved_bytes": 7, "evidence": OOM})
        sys.exit(1)

    def oom_abort(self):
        """Abort like a library that ends the process."""
        self.start()
        print(f"terminate called after throwing an instance of 'c10::{OOM}'", file=sys.stderr, flush=True)
        os.abort()

    def full(self):
        self.start()
        self.report({**OK, "retries": 3})

    def refuse(self):
        self.report({"event": "refused", "reason": "expected a torch for CUDA, found another: install it"})
        sys.exit(2)

    def host_pid(self):
        """Use a process id of the host, as NVML does in a container."""
        hold(CONTEXT, pid=990_001)
        self.context()
        hold(PEAK, pid=990_001)
        time.sleep(0.06)
        self.report(OK)

    def visited(self):
        """Run while another process starts and ends."""
        self.start()
        hold(PEAK)
        hold(300 * MIB, pid=990_002)
        time.sleep(0.06)
        hold(0, pid=990_002)
        self.report(OK)

    def lost(self):
        """Lose the GPU during the run."""
        self.start()
        path = Path(os.environ["NVML_STUB"])
        path.write_text(path.read_text().replace(" 0 0 NVIDIA", " 0 15 NVIDIA"))
        time.sleep(60)

    def another_gpu(self):
        hold(CONTEXT)
        self.context(uuid="ffff")

    def environment(self):
        self.start()
        names = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING")
        self.report({**OK, "versions": {name: os.environ.get(name, "") for name in names}})

    def meet(self):
        """Finish only if children run on two GPUs at the same time."""
        self.start()
        path = Path(os.environ["NVML_STUB"]).parent
        (path / f"on-{os.environ['CUDA_VISIBLE_DEVICES']}").touch()
        while len(list(path.glob("on-*"))) < 2:
            time.sleep(0.01)
        self.report(OK)


if __name__ == "__main__":
    getattr(Child(int(sys.argv[2])), sys.argv[1])()
