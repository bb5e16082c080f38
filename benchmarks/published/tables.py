"""Tables of published fine-tuning runs: turn their records into jobs."""

import csv
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.published import (
    fms,
    fms_ranks,
    liger,
    litgpt,
    litgpt_ranks,
    peft_comparison,
    swift,
    torchao,
    torchtitan,
    torchtune,
)
from benchmarks.published.job import PublishedJob, Record, combined
from vramcast.error_words import message_of
from vramcast.errors import UserError, check_amount

_COLUMNS = {"source", "model", "metric", "value_gib", "framework_versions", "notes"}
_Reader = Callable[[Record], PublishedJob | str]


def _by_gpus(one: _Reader, several: _Reader) -> _Reader:
    """Return a reader that reads rows on several GPUs by an importer of their own."""
    return lambda record: (one if record["n_gpus"] == "1" else several)(record)


_SOURCES: dict[str, _Reader] = {
    "fms-acceleration benchmarks": _by_gpus(fms.job_of, fms_ranks.job_of),
    "Liger-Kernel kernel benchmarks": liger.job_of,
    "litgpt config_hub": litgpt.job_of,
    "litgpt resource-tables": _by_gpus(litgpt.job_of, litgpt_ranks.job_of),
    "ms-swift Benchmark.md": swift.job_of,
    "PEFT method_comparison/MetaMathQA": peft_comparison.job_of,
    "PEFT method_comparison/image-gen": peft_comparison.job_of,
    "torchao": torchao.job_of,
    "torchtitan": torchtitan.job_of,
    "torchtune": torchtune.job_of,
}


@dataclass(frozen=True)
class PublishedTable:
    """The jobs of a table, and how many records were left out for each reason."""

    jobs: list[PublishedJob]
    left_out: Counter[str]


def read_published(path: Path) -> PublishedTable:
    """Read a table; equal runs become one job."""
    jobs: list[PublishedJob] = []
    left_out: Counter[str] = Counter()
    with _opened(path) as lines:
        records = csv.DictReader(lines)
        absent = sorted(_COLUMNS - set(records.fieldnames or ()))
        if absent:
            raise UserError(f"expected a table of published runs at {path}, found no column {absent[0]}: name another")
        for place, record in enumerate(records, 2):
            reader = _SOURCES.get(record["source"])
            try:
                job = f"source {record['source']} has no importer" if reader is None else reader(record)
                if isinstance(job, PublishedJob):
                    check_amount("the published memory", job.published_bytes, zero=False)
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
                raise UserError(
                    f"expected a run of {record['source']} at {path}:{place}, found: {message_of(error)}; "
                    "fix or remove it"
                ) from error
            if isinstance(job, str):
                left_out[job] += 1
            else:
                jobs.append(job)
    return PublishedTable(combined(jobs), left_out)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            yield lines
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"expected a CSV table at {path}, found: {error}; name another file") from error
