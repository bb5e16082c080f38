"""Rate and cost of building `space=universal backend=swept`: `python -m benchmarks.performance.mix_rate`.

Rates are per CPU second of the worker, which a busy machine changes little, without the start of the process and the
imports of the libraries.
"""

import tempfile
import time
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path

from vramcast.dataset_builder.configuration import compose_build, make_build, settings_of
from vramcast.dataset_builder.executors import SerialExecutor
from vramcast.dataset_builder.pipeline import run
from vramcast.dataset_builder.rows import Row

NETWORKS = 45
MILLION = 1_000_000
CORE_HOUR_USD = 0.04
"""Usual price of a core of a cloud's CPU machines on demand; spot prices are a third."""


def main() -> None:
    """Build some networks of the mix and print what they took."""
    warnings.filterwarnings("ignore")
    settings = settings_of(compose_build(["space=universal", "backend=swept", "sampler=uniform"]), [])
    with tempfile.TemporaryDirectory() as directory:
        build = make_build({**settings, "n": NETWORKS}, Path(directory))
        for values in islice(build.sampler.candidates(build.space, 1), NETWORKS):
            build.space.spec(values)  # imports the libraries
        rows: list[Row] = []
        start = time.process_time()
        run(build, SerialExecutor(), rows.append, lambda _: None)
        seconds = time.process_time() - start
        written = sum(path.stat().st_size for path in Path(directory).glob("*.jsonl"))
    statuses = Counter(row.measurement.status.value for row in rows)
    labelled = statuses["ok"] + statuses["oom"]
    labels = sum(1 + len(row.needs) for row in rows if row.measurement.status.value in ("ok", "oom"))
    rate, hours = labelled / seconds, MILLION * seconds / labelled / 3600
    print(f"{NETWORKS} networks: {len(rows)} rows ({', '.join(f'{count} {name}' for name, count in statuses.items())})")
    print(f"  {rate:.1f} rows and {labels / seconds:.1f} labels per CPU second; {written / len(rows):,.0f} bytes a row")
    print(f"  projected for a million rows: {hours:,.0f} core hours, {hours * CORE_HOUR_USD:,.1f} USD at "
          f"{CORE_HOUR_USD} USD, {MILLION * written / len(rows) / 1e9:.1f} GB")  # fmt: skip


if __name__ == "__main__":
    main()
