"""Stored simulations stay valid: whoever changes a trace or a replay raises the version of the virtual GPU.

`python tests/test_golden_traces.py` records the hashes again.
"""

import json
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest

from vramcast.dataset_builder.devices import load_profile
from vramcast.dataset_builder.golden import golden_specs
from vramcast.dataset_builder.measure.virtual import trace_spec
from vramcast.virtual_gpu.allocator import AllocatorOptions
from vramcast.virtual_gpu.simulate import simulate
from vramcast.virtual_gpu.version import VERSION

PATH = Path(__file__).parent / "golden" / "traces.json"
ADVICE = "bump virtual_gpu VERSION and record again"
TORCH = version("torch").partition("+")[0]


def trace_hash(spec):
    """A hash over the events of a trace, what they are for, and the peaks of its replay."""
    profile = load_profile("a100_40gb_gpumemnet_2024")
    trace = trace_spec(spec, profile.compute_capability)
    measurement = simulate(trace, profile, AllocatorOptions())
    peaks = [measurement.requested_bytes, measurement.allocated_bytes, measurement.reserved_bytes]
    calls = [list(map(str, vars(call).values())) for call in trace.calls]
    text = json.dumps([trace.events, [int(use) for use in trace.uses], calls, peaks])
    return sha256(text.encode()).hexdigest()[:16]


def current():
    return {
        "version": VERSION,
        "torch": TORCH,
        "traces": {key: trace_hash(spec) for key, spec in golden_specs().items()},
    }


def test_traces_change_with_the_version_of_the_virtual_gpu_only():
    recorded = json.loads(PATH.read_text())
    if recorded["torch"] != TORCH:
        pytest.skip(f"recorded with torch {recorded['torch']}")
    found = current()
    changed = [key for key, value in found["traces"].items() if recorded["traces"].get(key) != value]
    assert not changed or recorded["version"] != VERSION, f"{changed} changed: {ADVICE}"
    assert found == recorded, "record again: python tests/test_golden_traces.py"


if __name__ == "__main__":
    PATH.write_text(json.dumps(current(), indent=1) + "\n")
