"""Tables of published fine-tuning runs: recognise them, and turn their records into jobs."""

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vramcast.dataset_builder.published import fms, liger, litgpt, peft_comparison, swift, torchao, torchtune
from vramcast.dataset_builder.published.job import PublishedJob, Record, combined
from vramcast.errors import UserError

_COLUMNS = {"source", "model", "metric", "value_gib", "framework_versions", "notes"}
_SOURCES: dict[str, Callable[[Record], PublishedJob | str]] = {
    "fms-acceleration benchmarks": fms.job_of,
    "Liger-Kernel kernel benchmarks": liger.job_of,
    "litgpt config_hub": litgpt.job_of,
    "litgpt resource-tables": litgpt.job_of,
    "ms-swift Benchmark.md": swift.job_of,
    "PEFT method_comparison/MetaMathQA": peft_comparison.job_of,
    "PEFT method_comparison/image-gen": peft_comparison.job_of,
    "torchao": torchao.job_of,
    "torchtitan": lambda _: "more than one GPU (python -m benchmarks.field.published_ranks simulates ranks)",
    "torchtune": torchtune.job_of,
}


@dataclass(frozen=True)
class PublishedTable:
    """The jobs of a table, and how many records were left out for each reason."""

    jobs: list[PublishedJob]
    left_out: Counter[str]


def is_published_table(path: Path) -> bool:
    """Check for the columns of a table of published runs."""
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            return set(csv.DictReader(lines).fieldnames or ()) >= _COLUMNS
    except (OSError, UnicodeDecodeError, csv.Error):
        return False


def read_published(path: Path) -> PublishedTable:
    """Read a table; equal runs become one job."""
    jobs: list[PublishedJob] = []
    left_out: Counter[str] = Counter()
    with path.open(newline="", encoding="utf-8") as lines:
        for place, record in enumerate(csv.DictReader(lines), 2):
            reader = _SOURCES.get(record["source"])
            try:
                job = f"source {record['source']} has no importer" if reader is None else reader(record)
            except (ValueError, LookupError) as error:
                raise UserError(
                    f"expected a run of {record['source']} at {path}:{place}, found: {error}; fix or remove it"
                ) from error
            if isinstance(job, str):
                left_out[job] += 1
            else:
                jobs.append(job)
    return PublishedTable(combined(jobs), left_out)
