"""Time from a cold start to the first answer, compared with importing torch; and host memory for 70 billion parameters.

`python -m benchmarks.performance.cold_start`. Each figure is the best of several runs in new processes.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
RESNET = [
    f"{Path(__file__).with_name('resnet50.py')}:resnet50",
    "--batch-size",
    "32",
    "--input",
    "3,224,224",
    "--json",
]
LLAMA = ["hf:llama-70b", "--batch-size", "1", "--input", "4096", "--dtype", "bf16", "--json", "--device", "b200"]
STEP = "import torch; p = torch.nn.Parameter(torch.ones(1)); p.sum().backward(); torch.optim.AdamW([p]).step()"
RUNS = 3


def _timed(words: list[str]) -> tuple[float, float, str]:
    """Run Python; return wall seconds, CPU seconds and its output."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    result = subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu, result.stdout


def _best(words: list[str]) -> tuple[float, float]:
    runs = [_timed(words) for _ in range(RUNS)]
    return min(item[0] for item in runs), min(item[1] for item in runs)


def main() -> None:
    bare, step = _best(["-c", "import torch"]), _best(["-c", STEP])
    wall, cpu = _best(["-m", "vramcast", "classify", *RESNET])
    print(f"import torch:                   {bare[0]:6.2f} s, {bare[1]:6.2f} s of CPU")
    print(f"and one step of an optimizer:   {step[0]:6.2f} s, {step[1]:6.2f} s of CPU: torch imports its compiler")
    print(f"ResNet-50 from a cold start:    {wall:6.2f} s, {cpu:6.2f} s of CPU; two processes import torch")
    print(f"  relative to that step:        {wall / step[0]:6.2f}")
    seconds, cpu, out = _timed(["-m", "vramcast", "classify", *LLAMA])
    answer = json.loads(out)
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"Llama 70B, 4,096 tokens, bf16:  {seconds:6.2f} s, {cpu:6.2f} s of CPU")
    print(f"  largest process:              {peak_mib:6.0f} MiB of host memory")
    print(f"  estimated GPU memory:         {answer['estimate_mib'] / 1024:6.0f} GiB, simulated: {answer['verdict']}")


if __name__ == "__main__":
    main()
