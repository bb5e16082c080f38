"""Twelve measured fine-tuning jobs beside the figures of vramcast and of other estimators.

VRAMCAST_DATA=DIR python -m benchmarks.field.peers [--python PATH] [--stacks DIR]

The directory has the tables of published runs: `llm/fms_acceleration.csv` and `llm/peft_method_comparison.csv`. PATH is
an interpreter with the releases of `peers.txt`, installed without their dependencies beside torch and transformers:
`python -m benchmarks.field.peers --make` creates it below `.venvs`. All errors are of simulated or computed figures.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.page import show
from benchmarks.published.evaluation import PublishedStore, Result
from benchmarks.published.job import PublishedJob
from benchmarks.published.tables import read_published

_HERE = Path(__file__).parent
_HOME = Path(".venvs/peers")
_GIB = 2**30
CHOSEN = {
    "fms_acceleration.csv": (
        "mistral-7b full, batch 8 x 4096, bf16",
        "mistral-7b LoRA, batch 4 x 4096, bf16",
        "mistral-7b LoRA, batch 8 x 4096, bf16",
        "mistral-7b QLoRA, batch 4 x 4096, bf16, autocast",
        "mistral-7b QLoRA accelerated, batch 4 x 4096, bf16, autocast",
        "powerlm-3b full, batch 8 x 4096, bf16",
        "powerlm-3b LoRA, batch 4 x 4096, bf16",
        "powerlm-3b QLoRA accelerated, batch 4 x 4096, bf16",
        "santacoder full, batch 8 x 2048, bf16",
        "llama-2-70b QLoRA accelerated, batch 4 x 4096, bf16, autocast",
    ),
    "peft_method_comparison.csv": (
        "Llama-3.2-3B lora/llama-3.2-3B-rank64-rslora",
        "Llama-3.2-3B lora/llama-3.2-3B-rank10-target-mlp",
    ),
}
"""Each network and kind of the middle generation in bf16, and two LoRA jobs of PEFT; chosen by these words alone."""
_STACKS = ("transformers-4.45", "peft-0.20")
_GPUS = {"a100_80gb": "a100-80", "l40s": "l40s"}


def chosen_jobs(directory: Path) -> list[PublishedJob]:
    """Return the jobs in the order of the table; of equal titles, the one with the most runs."""
    jobs = []
    for name, titles in CHOSEN.items():
        listed = [item for item in read_published(directory / name).jobs if item.stack in _STACKS]
        for title in titles:
            same = [item for item in listed if item.title == title and item.metric in ("allocated", "reserved")]
            jobs.append(max(same, key=lambda item: item.runs))
    return jobs


def described(job: PublishedJob) -> dict[str, Any]:
    """Return a job as the other estimators take it."""
    values = job.parameters
    adapter = values.get("lora") or (values.get("adapter") or {}).get("config")
    config = {**values["network"], "vocab_size": values.get("tokens", values["network"].get("vocab_size"))}
    lora = None
    if adapter:
        lora = {"r": adapter["r"], "target_modules": list(adapter["target_modules"])}
    return {
        "config": config, "lora": lora, "quantised": bool(values.get("quantisation")), "gpu": _GPUS[job.device],
        "batch_size": values["batch_size"], "length": values["length"], "dtype": values.get("dtype", "bf16"),
        "checkpointing": values.get("checkpointing", True),
    }  # fmt: skip


def make_environment() -> None:
    """Create the environment of the other estimators, which finds torch and transformers in this interpreter's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", _HOME], check=True)
    own = next(_HOME.absolute().glob("lib/python*/site-packages"))
    libraries = [item for item in sys.path if Path(item).name in ("site-packages", "dist-packages")]
    (own / "libraries.pth").write_text("\n".join(libraries) + "\n")
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "-r", str(_HERE / "peers.txt")]
    subprocess.run([sys.executable, "-m", "pip", "--python", _HOME / "bin/python", *words], check=True)


def table(jobs: list[PublishedJob], results: list[Result | str], others: list[dict[str, Any]]) -> str:
    """Return the table of all figures, with the errors of each estimator below."""
    names = list(others[0])
    head = ["job", "measured", "vramcast", *(name.replace("_", "-") for name in names)]
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    errors: dict[str, list[float]] = {name: [] for name in ("vramcast", *names)}
    for job, result, answers in zip(jobs, results, others, strict=True):
        own = result.bytes_by_metric[job.metric] if isinstance(result, Result) else result
        cells = []
        for name, value in {"vramcast": own, **answers}.items():
            if isinstance(value, str):
                cells.append("-")
                if value != "-":
                    print(f"note: {name}, {job.title}: {value}", file=sys.stderr)
            else:
                errors[name].append(abs(value / job.published_bytes - 1))
                cells.append(f"{value / _GIB:.2f}")
        lines.append(f"| {job.title} | {job.published_bytes / _GIB:.2f} | {' | '.join(cells)} |")
    for label, figure in (("mean error", statistics.mean), ("median error", statistics.median)):
        cells = [f"{figure(values):.1%}" if values else "-" for values in errors.values()]
        lines.append(f"| {label} | | {' | '.join(cells)} |")
    lines.append(f"| jobs | {len(jobs)} | {' | '.join(str(len(values)) for values in errors.values())} |")
    return "\n".join(lines)


def main() -> None:
    """Show the table in GiB."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=str(_HOME / "bin/python"), help="an interpreter with the other estimators")
    parser.add_argument("--stacks", type=Path, default=Path(".venvs"), help="environments of published runs")
    parser.add_argument("--make", action="store_true", help="create the environment of the other estimators first")
    parser.add_argument("--page", type=Path, help="write the table into its marked part of this page")
    chosen = parser.parse_args()
    if chosen.make:
        make_environment()
    jobs = chosen_jobs(Path(os.environ["VRAMCAST_DATA"]) / "llm")
    words = [chosen.python, str(_HERE / "peer_estimates.py")]
    descriptions = json.dumps([described(job) for job in jobs])
    done = subprocess.run(words, input=descriptions, stdout=subprocess.PIPE, text=True, check=True)
    store = PublishedStore(None, chosen.stacks)
    text = table(jobs, [store.attempt(job) for job in jobs], json.loads(done.stdout))
    show(chosen.page, "field.peers", "table", text)


if __name__ == "__main__":
    main()
