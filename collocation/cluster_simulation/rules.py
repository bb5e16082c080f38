"""The rules of a simulated cluster, with the source of each number that comes from another project."""

from dataclasses import dataclass

from vramcast.collocation.placement import POLICIES
from vramcast.errors import check_amount, check_choice, check_count
from vramcast.virtual_gpu.allocator.sizes import MIB

EXCLUSIVE, BEST_FIT, MOST_FREE = "exclusive", "best-fit", "most-free"
"""The policies that other modules name."""
HEAD_OF_LINE, BACKFILL = "head-of-line", "backfill"
QUEUES = (HEAD_OF_LINE, BACKFILL)
RESERVED, OBSERVED = "reserved", "observed"
LEDGERS = (RESERVED, OBSERVED)


@dataclass(frozen=True, kw_only=True)
class ClusterRules:
    """How jobs are placed, what sharing costs them, and what happens when they run out of memory."""

    gpus: int = 4
    capacity_bytes: int = 40_410 * MIB
    """The memory of a GPU for all jobs and their contexts."""
    policy: str = MOST_FREE
    queue: str = HEAD_OF_LINE
    """A job without a place blocks the jobs behind it, as in CARMA, or lets them overtake."""
    ledger: str = OBSERVED
    """The memory that counts as taken: the reservations of jobs, or their observed use.

    The second is CARMA's rule: a GPU accepts no job between the start of a job and its peak.
    """
    remember: bool = False
    """A job that ran before needs its observed peak and the service's margin, whatever the estimate."""
    slowdown: float = 0.4
    """The cost of sharing: k jobs on a GPU run at 1 / (1 + slowdown * (k - 1)) of their solo speed.

    An assumption. With 0.4, sharing under known peaks saves as much time as AEGIS measured (benchmarks/collocation).
    """
    peak_after_s: float = 22.6
    """From start to peak. AEGIS lost 22.6 s on average to a job that ran out of memory."""
    retry_after_s: float = 30.0
    """From a crash until the job is queued again. CARMA checks every 30 s."""
    backfill_depth: int = 500
    """The number of waiting jobs that are tried: Slurm's bf_max_job_test, 500 by default."""

    def __post_init__(self) -> None:
        check_count("--gpus", self.gpus)
        check_count("the capacity of the device", self.capacity_bytes)
        check_count("the depth of backfilling", self.backfill_depth)
        check_choice("--policy", self.policy, POLICIES)
        check_choice("--queue", self.queue, QUEUES)
        check_choice("--ledger", self.ledger, LEDGERS)
        for name in ("slowdown", "peak_after_s", "retry_after_s"):
            check_amount(f"--{name.replace('_', '-')}", getattr(self, name))

    def rate(self, jobs: int) -> float:
        """Return the speed of each of several jobs on a GPU; 1 is the speed of a job alone."""
        return 1 / (1 + self.slowdown * (jobs - 1))
