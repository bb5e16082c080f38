"""Ten fine-tuning jobs of a small Qwen, by `vramcast classify` and by `vramcast run` with the loop itself.

python -m benchmarks.field.qwen_cases [--network qwen2-0.5b] [--loop plain] [--python PATH]

Both figures are simulated: what `torch.cuda.max_memory_allocated` would say. The interpreter needs transformers, peft
and accelerate.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vramcast.jobs.architectures import find_architecture

_SCRIPT = Path(__file__).with_name("qwen_sft.py")
_LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
CASES: tuple[dict[str, Any], ...] = tuple(
    {"lora": lora, "tokens": tokens, "accumulate": accumulate, "checkpointing": checkpointing}
    for lora in (None, _LORA)
    for tokens, accumulate, checkpointing in (
        (16, 1, False), (16, 4, False), (128, 1, False), (128, 4, False), (128, 1, True),
    )
)  # fmt: skip
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": "adamw", "keep_output": True},
    "single": {"optimizer": "adamw(foreach=False)", "keep_output": True},
    "trainer": {"optimizer": "adamw_torch_fused"},
}
"""The options of `classify` for a loop. `single` is plain with an optimizer that takes one tensor after the other; the
Trainer's optimizer is fused by default since torch 2.8."""


def title(case: dict[str, Any]) -> str:
    """Return the name of a case."""
    extras = [f"{case['accumulate']} batches a step"] if case["accumulate"] > 1 else []
    extras += ["checkpointing"] if case["checkpointing"] else []
    return ", ".join(["LoRA" if case["lora"] else "full", f"{case['tokens']} tokens", *extras])


def classify(network: str, loop: str, python: str, device: str) -> list[float]:
    """Return the allocated MiB of all cases by `vramcast classify`."""
    common = {"target": f"hf:{network}", "batch_size": 1, "dtype": "bf16", "python": python, "device": device}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "jobs.jsonl"
        path.write_text("".join(json.dumps({**common, **LOOPS[loop], **_options(case)}) + "\n" for case in CASES))
        words = [sys.executable, "-m", "vramcast", "classify", "--jobs", str(path), "--json"]
        out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return [json.loads(line)["allocated_mib"] for line in out.splitlines()]


def _options(case: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in case.items() if key in ("accumulate", "checkpointing")}
    return {**options, "input": str(case["tokens"]), **({"lora": case["lora"]} if case["lora"] else {})}


def run(network: str, loop: str, case: dict[str, Any], python: str, device: str, steps: int) -> float:
    """Return the allocated MiB of a case, as its script reads it under `vramcast run`."""
    architecture, sizes = find_architecture(network)
    config = {"model_type": architecture.removesuffix("ForCausalLM").lower(), **sizes}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figures.json"
        job = {**case, "batch_size": 1, "steps": steps, "loop": loop, "config": config, "figures": str(path)}
        words = ["run", "--device", device, "--steps", "1000", "--json", "--", python, str(_SCRIPT), json.dumps(job)]
        done = subprocess.run([sys.executable, "-m", "vramcast", *words], check=False, capture_output=True, text=True)
        if not path.exists():
            raise RuntimeError(f"{title(case)} under the loop {loop}: {done.stderr[-2000:]}")
        return float(json.loads(path.read_text())) / 2**20


def table(network: str, loop: str, python: str, device: str, steps: int) -> str:
    """Return the table of a network under a loop."""
    lines = [f"| {network}, {loop} | classify | run | difference |", "| --- | ---: | ---: | ---: |"]
    differences = []
    for case, classified in zip(CASES, classify(network, loop, python, device), strict=True):
        simulated = run(network, loop, case, python, device, steps)
        differences.append(abs(classified / simulated - 1))
        lines.append(f"| {title(case)} | {classified:,.1f} | {simulated:,.1f} | {classified / simulated - 1:+.2%} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, f"| mean | | | {statistics.mean(differences):.2%} |"])


def main() -> None:
    """Print a table for each loop."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--network", default="qwen2-0.5b")
    parser.add_argument("--loop", nargs="+", default=["plain", "trainer"], choices=LOOPS)
    parser.add_argument("--python", default=sys.executable, help="an interpreter with transformers and peft")
    parser.add_argument("--device", default="a100_40gb")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of the loop")
    chosen = parser.parse_args()
    for loop in chosen.loop:
        print(table(chosen.network, loop, chosen.python, chosen.device, chosen.steps), flush=True)


if __name__ == "__main__":
    main()
