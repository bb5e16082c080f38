"""Compare our figures for the jobs of the public table with their measured peaks.

Run `python -m benchmarks.collocation.jobs DIR`; DIR has `jobs.csv`. Peaks were measured by others on an A100 40 GB, the
figures beside them are simulated.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.collocation.tables import DEVICE
from vramcast.collocation.cluster_simulation.ours import AnswerSettings, answers
from vramcast.collocation.cluster_simulation.workload import TraceJob, read_jobs
from vramcast.dataset_builder.simulation_store import SimulationStore
from vramcast.models.answer import Answer
from vramcast.virtual_gpu.allocator.sizes import MIB


def lines(jobs: Mapping[str, TraceJob], results: Iterable[Answer]) -> Iterator[str]:
    """Yield a table: the measured peak, the virtual GPU's figure and our bound of each job."""
    yield "| job | batch | measured, MiB | virtual GPU, MiB | error | bound, MiB | bound / measured |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for answer in results:
        measured = jobs[answer.target].peak_bytes / MIB
        simulated = sum(answer.breakdown_mib.values())
        yield (
            f"| {answer.target} | {answer.batch_size:,} | {measured:,.0f} | {simulated:,.0f} | "
            f"{simulated / measured - 1:+.1%} | {answer.safe_mib:,.0f} | {answer.safe_mib / measured:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, metavar="DIR")
    parser.add_argument("--cache", default="runs/simulations")
    parser.add_argument("--checkpoint", default=AnswerSettings().checkpoint)
    parser.add_argument("--risk", type=float, default=AnswerSettings().risk)
    parser.add_argument("--job", action="append", help="only this job; may be repeated")
    arguments = parser.parse_args()
    jobs = read_jobs(arguments.data / "jobs.csv")
    chosen = [job for job in jobs.values() if not arguments.job or job.name in arguments.job]
    settings = AnswerSettings(arguments.checkpoint, arguments.risk)
    print("\n".join(lines(jobs, answers(chosen, DEVICE, settings, SimulationStore(arguments.cache, 1)))))


if __name__ == "__main__":
    main()
