"""Cost of a virtual GPU: `python -m benchmarks.performance.run_cost`.

Compares training steps on a virtual GPU with the same steps on plain meta tensors, and imports with that of torch.
Times are of the CPU, so that a busy machine does not decide.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.performance.trace_speed import SUBJECTS
from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.training.step import loss_of, random_inputs

_STEPS = 3
_IMPORTS = ("import torch", "import vramcast, torch", "import vramcast.virtual_gpu.cuda.emulation")


def _train(subject: nn.Module, make: Callable[[], tuple[torch.Tensor, ...]]) -> float:
    """Return the seconds of CPU time for a step, without the first."""
    optimizer = torch.optim.Adam(subject.parameters(), foreach=True)
    start = 0.0
    for step in range(_STEPS + 1):
        if step == 1:
            start = time.process_time()
        optimizer.zero_grad()
        loss_of("cross_entropy", subject(*make())).backward()
        optimizer.step()
    return (time.process_time() - start) / _STEPS


def _import_seconds(code: str) -> float:
    timed = f"import time; start = time.process_time(); {code}; print(time.process_time() - start)"
    runs = [subprocess.run([sys.executable, "-c", timed], check=True, capture_output=True) for _ in range(3)]
    return min(float(run.stdout) for run in runs)


def main() -> None:
    """Print both comparisons."""
    print("| subject | plain meta tensors | virtual GPU | ratio |")
    print("| --- | --- | --- | --- |")
    for name, (make, batch_size, shape) in SUBJECTS.items():
        inputs = [(shape.shape, shape.vocabulary)]
        with torch.device("meta"):
            subject = make().train()
        plain = _train(subject, partial(random_inputs, inputs, batch_size, "fp32", "meta"))
        with CudaEmulation(load_profile("h200"), unbounded=True) as gpu:
            subject = make().train().cuda()
            before = gpu.tracer.operators
            virtual = _train(
                subject, lambda inputs=inputs, size=batch_size: random_inputs(inputs, size, "fp32", "cuda")
            )  # type: ignore[misc]
            operators = (gpu.tracer.operators - before) / (_STEPS + 1)
        each = f"{1e6 * virtual / operators:.0f} µs an operator"
        print(
            f"| {name} | {1e3 * plain:.0f} ms | {1e3 * virtual:.0f} ms ({each}) | {virtual / plain:.2f} |", flush=True
        )
    base = _import_seconds(_IMPORTS[0])
    for code in _IMPORTS:
        seconds = _import_seconds(code)
        print(f"`{code}`: {seconds:.2f} s, {seconds / base:.2f} times `import torch`", flush=True)


if __name__ == "__main__":
    main()
