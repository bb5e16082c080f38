"""The rules of a simulated cluster; where a figure is another project's, it says whose."""

from dataclasses import dataclass

from vramcast.collocation.placement import POLICIES
from vramcast.errors import check_amount, check_choice, check_count
from vramcast.virtual_gpu.sizes import MIB

EXCLUSIVE, BEST_FIT, MOST_FREE = "exclusive", "best-fit", "most-free"
"""Of the policies, those that are asked for by name."""
HEAD_OF_LINE, BACKFILL = "head-of-line", "backfill"
QUEUES = (HEAD_OF_LINE, BACKFILL)
RESERVED, OBSERVED = "reserved", "observed"
LEDGERS = (RESERVED, OBSERVED)


@dataclass(frozen=True, kw_only=True)
class ClusterRules:
    """How jobs are placed, what sharing costs them, and what becomes of those that run out of memory."""

    gpus: int = 4
    capacity_bytes: int = 40_410 * MIB
    """What jobs and their contexts may use of a card together."""
    policy: str = MOST_FREE
    queue: str = HEAD_OF_LINE
    """Whether a job that finds no place keeps those behind it waiting, as in CARMA, or lets them overtake."""
    ledger: str = OBSERVED
    """What counts as taken: what was set aside for jobs, or what they are seen to use.

    The second is CARMA's: a GPU is closed from when a job starts there until its peak is reached.
    """
    remember: bool = False
    """Whether a job that ran before asks for what it took then, with the service's margin, and no more by estimate."""
    slowdown: float = 0.4
    """Of a job for each other one on its GPU: k jobs run at 1 / (1 + slowdown * (k - 1)) of their solo speed.

    An assumption. With 0.4, sharing under known peaks saves as much time as AEGIS measured (docs/collocation.md).
    """
    peak_after_s: float = 22.6
    """From start to peak. AEGIS lost 22.6 s on average to a job that ran out of memory."""
    retry_after_s: float = 30.0
    """From a crash until it is noticed and queued again. CARMA looks at windows of 30 s."""
    backfill_depth: int = 500
    """How many waiting jobs are tried at a time: Slurm's bf_max_job_test, whose default is 500."""

    def __post_init__(self) -> None:
        check_count("--gpus", self.gpus)
        check_count("the card's capacity", self.capacity_bytes)
        check_count("the depth of backfilling", self.backfill_depth)
        check_choice("--policy", self.policy, POLICIES)
        check_choice("--queue", self.queue, QUEUES)
        check_choice("--ledger", self.ledger, LEDGERS)
        for name in ("slowdown", "peak_after_s", "retry_after_s"):
            check_amount(f"--{name.replace('_', '-')}", getattr(self, name))

    def rate(self, jobs: int) -> float:
        """The speed of each of so many jobs on a GPU, where 1 is that of one alone."""
        return 1 / (1 + self.slowdown * (jobs - 1))
