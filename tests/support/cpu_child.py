"""The real child on the CPU: `python cpu_child.py MODE FD`. The values of torch.cuda are made up."""

import sys
from types import SimpleNamespace

import torch
from fake_child import CONTEXT, MIB, hold

from vramcast.dataset_builder.backends.cuda import child, training_run

TOTAL = 40 * 2**30
PEAKS = {"requested_bytes": 100 * MIB, "allocated_bytes": 101 * MIB, "reserved_bytes": 500 * MIB}
run_on = training_run.training_run


def mem_get_info():
    hold(CONTEXT)
    return TOTAL, TOTAL


def limit(fraction):
    if int(fraction * TOTAL) < PEAKS["reserved_bytes"]:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def run(spec, epochs, device):
    assert device == "cuda"
    for number, size in enumerate(run_on(spec, epochs, "cpu")):
        hold(CONTEXT + PEAKS["reserved_bytes"])
        if sys.argv[1] == "crash" and number == 3:
            raise RuntimeError("CUDA error: device-side assert triggered")
        yield size


torch.cuda.is_available = lambda: True
torch.cuda.mem_get_info = mem_get_info
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid="a")
torch.cuda.memory_stats = lambda: {f"{name}.all.peak": value for name, value in PEAKS.items()}
torch.cuda.synchronize = lambda: None
torch.cuda.set_per_process_memory_fraction = limit
torch.backends.cudnn.version = lambda: 90100
training_run.training_run = run

if __name__ == "__main__":
    sys.exit(child.main(int(sys.argv[2])))
