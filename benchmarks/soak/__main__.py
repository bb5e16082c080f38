"""Attacks on the service, the cluster simulator and `vramcast run`: `python -m benchmarks.soak`, which is `make soak`.

Sends requests to 127.0.0.1 alone. Progress is kept in a directory, so an interrupted soak resumes.
"""

import argparse
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.soak import extreme_traces, kills, replicas, run_attacks, service_attacks
from benchmarks.soak.mutated_requests import FAMILIES, mutated
from benchmarks.soak.running_service import RunningService, running_service

REQUESTS, KILLS, TRACES, PLACEMENTS = 20_000, 60, 3_000, 10_000
SEQUENCES, SCRIPTS, RUN_KILLS = 1_000, 520, 30
"""Of `run`: sequences of file operations under each way of protection, scripts with attacks, and kills."""
PARTS = ("traces", "attacks", "requests", "kills", "replicas", "run")
_THREADS = 4
_CHUNK = 200
_SEQUENCES_OF_A_RUN = 100


class Soak:
    """The state of a soak, kept in a file."""

    def __init__(self, directory: Path, scale: float) -> None:
        self.directory = directory
        self.scale = scale
        self.path = directory / "state.json"
        directory.mkdir(parents=True, exist_ok=True)
        self.state: dict[str, Any] = {"done": {}, "figures": {}, "faults": [], "acknowledged": {}}
        if self.path.exists():
            self.state = json.loads(self.path.read_text(encoding="utf-8"))

    def count(self, full: int) -> int:
        """Return a count at the scale of this soak."""
        return max(1, round(full * self.scale))

    def done(self, part: str) -> int:
        """Return how much of a part is done."""
        return int(self.state["done"].get(part, 0))

    def advance(self, part: str, done: int, faults: list[str]) -> None:
        """Keep the progress of a part."""
        self.state["done"][part] = done
        self.state["faults"] += faults
        self.path.write_text(json.dumps(self.state, indent=1), encoding="utf-8")
        for text in faults:
            print(f"FAULT {text}", flush=True)

    def run_traces(self) -> None:
        """Simulate traces with extreme values."""
        total = self.count(TRACES)
        for start in range(self.done("traces"), total, _CHUNK):
            end = min(start + _CHUNK, total)
            texts = {seed: extreme_traces.fault(seed) for seed in range(start, end)}
            self.advance("traces", end, [f"trace {seed}: {text}" for seed, text in texts.items() if text])
        print(f"{total:,} extreme traces", flush=True)

    def run_attacks(self) -> None:
        """Attack the memory and the time of one service, one attack after the other."""
        names = [name for name in service_attacks.ATTACKS if not self.done(name)]
        if not names:
            return
        with running_service(self.directory / "attacks.log") as service:
            for name in names:
                try:
                    figures, faults = service_attacks.attacked(service, name, self.scale)
                except AssertionError as error:
                    figures, faults = {}, [f"{name}: {error}"]
                self.state["figures"][name] = figures
                self.advance(name, 1, faults)
                print(f"{name}: " + ", ".join(f"{key} {value:.1f}" for key, value in figures.items()), flush=True)

    def run_requests(self) -> None:
        """Send mutated requests of each family of endpoints."""
        total = self.count(REQUESTS)
        if all(self.done(f"requests {family}") >= total for family in FAMILIES):
            return
        history = str(self.directory / "requests.history")
        with running_service(self.directory / "requests.log", "--history", history) as service:
            memory_mib = [service.memory_mib()]
            for family in FAMILIES:
                self._family(service, family, total)
                memory_mib.append(service.memory_mib())
                statuses = self.state["figures"][f"requests {family}"]
                print(f"{total:,} requests of {family}: {statuses}, {memory_mib[-1]:.0f} MiB", flush=True)
            growth_mib = memory_mib[-1] - memory_mib[0]
            self.state["figures"]["requests"] = {"memory_mib": memory_mib[-1], "growth_mib": growth_mib}
            faults = (
                [f"requests: memory grew by {growth_mib:.0f} MiB"]
                if growth_mib > 2 * service_attacks.MOST_GROWTH_MIB
                else []
            )
            self.advance("requests", 1, faults)

    def _family(self, service: RunningService, family: str, total: int) -> None:
        part = f"requests {family}"
        statuses = self.state["figures"].setdefault(part, {})
        with ThreadPoolExecutor(_THREADS) as threads:
            for start in range(self.done(part), total, _CHUNK):
                seeds = range(start, min(start + _CHUNK, total))
                faults = []
                for seed, (status, text) in zip(
                    seeds, threads.map(lambda seed: _sent(service, family, seed), seeds), strict=True
                ):
                    statuses[str(status)] = statuses.get(str(status), 0) + 1
                    if text:
                        faults.append(f"{family} {seed}: {text}")
                self.advance(part, seeds[-1] + 1, faults)

    def run_kills(self) -> None:
        """Kill a service under load."""
        acknowledged = {int(batch): peak for batch, peak in self.state["acknowledged"].items()}
        total = self.count(KILLS)
        for number in range(self.done("kills"), total + 1):  # the last start checks what the last kill left
            faults = kills.killed(self.directory, number, acknowledged)
            self.state["acknowledged"] = acknowledged
            self.advance("kills", number + 1, faults)
        print(f"{total} kills, {len(acknowledged):,} acknowledged observations", flush=True)

    def run_replicas(self) -> None:
        """Place pods by two replicas that share a database."""
        if self.done("replicas"):
            return
        counts, faults = replicas.placed(self.directory, self.count(PLACEMENTS))
        self.state["figures"]["replicas"] = counts
        self.advance("replicas", 1, faults)
        print(f"placements by two replicas: {counts}", flush=True)

    def run_run(self) -> None:
        """Attack `vramcast run`: with file operations, with scripts, and by kills."""
        ways, missing = run_attacks.offered_ways()
        for way, reason in missing.items():
            print(f"run: the protection {way} is skipped: {reason}", flush=True)
        directory = (self.directory / "run").resolve()
        for way in ways:
            self._sequences(directory, way)
        self._scripts(directory, ways)
        total = self.count(RUN_KILLS)
        for number in range(self.done("run kills"), total):
            self.advance("run kills", number + 1, run_attacks.killed(directory, number, ways))
        print(f"{total} kills of vramcast run", flush=True)

    def _sequences(self, directory: Path, way: str) -> None:
        total, part = self.count(SEQUENCES), f"run sequences {way}"
        for start in range(self.done(part), total, _SEQUENCES_OF_A_RUN):
            end = min(start + _SEQUENCES_OF_A_RUN, total)
            self.advance(part, end, run_attacks.compared_sequences(directory, way, start, end))
            print(f"run: {end:,} of {total:,} sequences of file operations, {way}", flush=True)

    def _scripts(self, directory: Path, ways: list[str]) -> None:
        total, part = self.count(SCRIPTS), "run scripts"
        endings = self.state["figures"].setdefault(part, {})
        with closing(run_attacks.Scripts(directory, ways)) as scripts:
            for seed in range(self.done(part), total):
                ending, faults = scripts.run(seed)
                endings[ending] = endings.get(ending, 0) + 1
                self.advance(part, seed + 1, [f"script {seed}: {text}" for text in faults])
                print(f"run: {seed + 1:,} of {total:,} scripts, {ending}", flush=True)


def _sent(service: RunningService, family: str, seed: int) -> tuple[int, str | None]:
    """Send a request. Return its status, and what is wrong with the response."""
    path, body = mutated(family, seed)
    try:
        status, reply = service.request(path, body, "text/plain" if family == "slurm" else "application/json")
        if status >= 500 and status not in (503, 507):
            return status, f"{path} answered {status}"
        if not (family == "slurm" and status == 200):
            json.loads(reply)
    except (OSError, ValueError) as error:
        return 0, f"{path}: {error!r}"
    return status, None


def main() -> int:
    """Run the soak. The exit code is 1 if a bound did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts; default: %(default)s")
    parser.add_argument("--only", choices=PARTS, action="append", help="run one part; repeatable")
    parser.add_argument("--directory", type=Path, default=Path("runs/soak"), help="progress; default: %(default)s")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and so would scripts
    soak = Soak(arguments.directory, arguments.scale)
    for part in arguments.only or PARTS:
        getattr(soak, f"run_{part}")()
    faults = soak.state["faults"]
    print(f"{len(faults)} faults; progress and figures are in {soak.path}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
