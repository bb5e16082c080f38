"""Simulate 10,000 generated jobs on 1,000 GPUs: `python -m benchmarks.performance.simulator_scale`."""

import resource
import sys
import time
from random import Random

from vramcast.collocation.cluster_simulation.cluster import simulate
from vramcast.collocation.cluster_simulation.cluster_metrics import cluster_metrics
from vramcast.collocation.cluster_simulation.rules import QUEUES, ClusterRules
from vramcast.collocation.cluster_simulation.workload import Submission, TraceJob
from vramcast.collocation.placement import POLICIES
from vramcast.virtual_gpu.allocator.sizes import MIB

JOBS, GPUS, SECONDS = 10_000, 1_000, 60


def generated_trace(jobs: int, gpus: int, seed: int = 1) -> list[Submission]:
    """Generate jobs of many sizes, one in eight on several GPUs, that arrive slightly faster than GPUs become free."""
    random = Random(seed)
    kinds = []
    for index in range(400):
        peak_bytes = int(min(random.lognormvariate(8.6, 1.0), 40_000) * MIB)
        count = random.choice((2, 4, 8)) if random.random() < 0.125 else 1
        solo_s = min(random.lognormvariate(7.3, 0.9), 40_000)
        kinds.append(TraceJob(f"job{index}", count, 32, peak_bytes, solo_s))
    gpu_seconds = sum(job.gpus * job.solo_s for job in kinds) / len(kinds)
    arrival_s, trace = 0.0, []
    for number in range(jobs):
        trace.append(Submission(number, arrival_s, random.choice(kinds)))
        arrival_s += random.expovariate(1.3 * gpus / gpu_seconds)
    return trace


def main() -> int:
    """Print one line per policy and queue; return 1 if one is too slow."""
    trace = generated_trace(JOBS, GPUS)
    needs = {item.job.name: item.job.peak_bytes for item in trace}
    slowest_s = 0.0
    print(f"vramcast simulate, {JOBS:,} jobs on {GPUS:,} GPUs, one core")
    for queue in QUEUES:
        for policy in POLICIES:
            rules = ClusterRules(gpus=GPUS, policy=policy, queue=queue)
            start = time.perf_counter()
            metrics = cluster_metrics(simulate(trace, needs, rules), rules)
            seconds = time.perf_counter() - start
            slowest_s = max(slowest_s, seconds)
            print(f"  {queue:12} {policy:9} {seconds:6.2f} s; makespan {metrics.makespan_s:,.0f} s", flush=True)
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  at most {slowest_s:.1f} s (limit {SECONDS} s), {megabytes:.0f} MiB of memory")
    return int(slowest_s > SECONDS)


if __name__ == "__main__":
    sys.exit(main())
