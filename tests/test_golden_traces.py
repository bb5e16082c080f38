"""Stored simulations stay valid: whoever changes a trace or a replay raises the version of the virtual GPU.

`python tests/test_golden_traces.py` records the hashes again.
"""

import json
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from rank_traces import mlp, rank_trace, rows
from torch import nn

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.dataset_builder.golden import golden_specs
from vramcast.device.profiles import load_profile
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.version import VERSION

PATH = Path(__file__).parent / "golden" / "traces.json"
ADVICE = "bump virtual_gpu VERSION and record again"
LIBRARIES = {name: version(name).partition("+")[0] for name in ("torch", "timm", "transformers")}


TIMM = {"name": "regnety_002", "num_classes": 10, "input_shape": [3, 64, 64]}
LLAMA = {
    "architecture": "LlamaForCausalLM",
    "sequence": 64,
    "config": {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
LIBRARY_SPECS = {
    "timm, fp16 autocast": Spec("timm", TIMM, TrainingSetup(batch_size=4, autocast="fp16")),
    "timm, cudnn.benchmark": Spec("timm", TIMM, TrainingSetup(batch_size=4, cudnn_benchmark=True, optimizer="SGD")),
    "grouped-query attention, bf16": Spec("hf", LLAMA, TrainingSetup(batch_size=2, dtype="bf16", loss="own")),
}
DEVICES = ("a100_40gb_gpumemnet_2024", "t4", "h100_80gb")


def recurrent_trace(compute_capability):
    """A trace of layers that no family has: an LSTM and a GRU."""
    with torch.device("meta"):
        network = Recurrent()
    setup = TrainingSetup(batch_size=8, loss="mse")
    return trace_training(
        network, lambda size: (torch.empty(size, 20, 32, device="meta"),), setup, compute_capability=compute_capability
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(64, 16, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.gru(self.lstm(x)[0])[0]


def traces():
    """All recorded jobs with the device that they are traced for: what depends on it is traced for several."""
    for key, spec in golden_specs().items():
        yield key, DEVICES[0], trace_spec(spec, load_profile(DEVICES[0]).compute_capability)
    for device in DEVICES:
        capability = load_profile(device).compute_capability
        for key, spec in LIBRARY_SPECS.items():
            yield f"{key} on {device}", device, trace_spec(spec, capability)
        yield f"LSTM and GRU on {device}", device, recurrent_trace(capability)
    for strategy in ("fsdp2", "fsdp1", "ddp"):
        yield f"a rank of {strategy}", DEVICES[0], rank_trace(mlp, rows(), strategy)


def trace_hash(trace, profile):
    """A hash over the events of a trace, what they are for, and the peaks of its replay."""
    measurement = simulate(trace, profile, AllocatorOptions())
    peaks = [measurement.requested_bytes, measurement.allocated_bytes, measurement.reserved_bytes]
    calls = [list(map(str, vars(call).values())) for call in trace.calls]
    text = json.dumps([trace.events, [int(use) for use in trace.uses], calls, peaks])
    return sha256(text.encode()).hexdigest()[:16]


def current():
    hashes = {key: trace_hash(trace, load_profile(device)) for key, device, trace in traces()}
    return {"version": VERSION, "libraries": LIBRARIES, "traces": hashes}


def test_traces_change_with_the_version_of_the_virtual_gpu_only():
    recorded = json.loads(PATH.read_text())
    if recorded["libraries"]["torch"] != LIBRARIES["torch"]:
        pytest.skip(f"recorded with {recorded['libraries']}")
    other_libraries = recorded["libraries"] != LIBRARIES
    found = {key: value for key, value in current()["traces"].items() if not (other_libraries and is_of_library(key))}
    changed = [key for key, value in found.items() if recorded["traces"].get(key) != value]
    assert not changed or recorded["version"] != VERSION, f"{changed} changed: {ADVICE}"
    assert not changed and recorded["version"] == VERSION, "record again: python tests/test_golden_traces.py"
    assert found.keys() == {key for key in recorded["traces"] if not (other_libraries and is_of_library(key))}


def is_of_library(key):
    """Networks of timm and transformers, which change with their library."""
    return key.startswith(tuple(LIBRARY_SPECS))


if __name__ == "__main__":
    PATH.write_text(json.dumps(current(), indent=1) + "\n")
