"""`make compat`: a few networks, traced with older releases of torch and transformers, beside the newest.

Environments are kept in `.venvs`, so that the next run starts with those that are complete. Exit code 1 if a network
cannot be traced, or if its peak differs from the newest release's by more than `_TOLERANCE`.
"""

import json
import subprocess
import sys
from pathlib import Path

from environments import ENVIRONMENTS, ROOT, Environment

_HERE = Path(__file__).resolve().parent
_TOLERANCE = 0.15
"""T5 differs by 12 % between two releases of transformers."""
TORCH_JOBS = [
    {"target": f"{_HERE / 'plain_networks.py'}:{name}", "batch_size": 16, "input": shape, **options}
    for name, shape, options in (
        ("mlp", "784", {}),
        ("mlp", "784", {"optimizer": "sgd(momentum=0.9)"}),
        ("convolutions", "3,64,64", {"autocast": "bf16"}),
        ("convolutions", "3,64,64", {"optimizer": "adamw", "autocast": "fp16"}),
        ("attention", "64:1000", {}),
        ("attention", "64:1000", {"autocast": "bf16", "checkpointing": True}),
        ("recurrent", "32,16", {"accumulate": 2}),
    )
]
TRANSFORMERS_JOBS = [
    {"target": f"hf:{name}", "batch_size": 2, "input": "128", "autocast": autocast}
    for name in ("bert-base", "gpt2", "llama-3.2-1b", "qwen2-0.5b", "t5-small", str(_HERE / "gemma.json"))
    for autocast in (None, "bf16")
] + [{"target": "hf:vit-base", "batch_size": 2}]


def jobs_of(environment: Environment) -> list[dict[str, object]]:
    """Return the jobs that an environment has the libraries for."""
    jobs = [] if environment.libraries else TORCH_JOBS
    return [*jobs, *([] if environment.torch else TRANSFORMERS_JOBS)]


def answers(environment: Environment) -> list[dict[str, object]]:
    """Classify the jobs with the interpreter of an environment."""
    path = ROOT / f"{environment.name}.jsonl"
    lines = [json.dumps({**job, "python": str(environment.python)}) for job in jobs_of(environment)]
    path.write_text("\n".join(lines) + "\n")
    words = [sys.executable, "-m", "vramcast", "classify", "--jobs", path, "--json"]
    result = subprocess.run(words, text=True, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def main() -> int:
    """Print a table of all networks and environments."""
    ROOT.mkdir(exist_ok=True)
    reserved: dict[str, float] = {}
    failures = 0
    for environment in ENVIRONMENTS:
        environment.make()
        for job, answer in zip(jobs_of(environment), answers(environment), strict=True):
            key = json.dumps(job)
            label = f"{Path(str(job['target'])).name} " + " ".join(
                str(job[name]) for name in ("optimizer", "autocast", "checkpointing", "accumulate") if job.get(name)
            )
            if answer["status"] != "ok":
                failures += 1
                print(f"{environment.name:18} {label:40} FAILED: {answer['error']}")
                continue
            mib = float(answer["reserved_mib"])  # type: ignore[arg-type]
            change = mib / reserved.setdefault(key, mib) - 1
            failures += abs(change) > _TOLERANCE
            versions = ", ".join(f"{name} {value}" for name, value in answer["traced_with"].items())  # type: ignore[attr-defined]
            print(f"{environment.name:18} {label:40} {mib:10,.0f} MiB {change:+7.1%}  {versions}")
    print(f"{failures} failures" if failures else "all networks traced")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
