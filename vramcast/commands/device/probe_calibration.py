"""Calibration by probes: of this machine's GPU, or of the virtual GPU with a profile that the search does not see."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vramcast.dataset_builder.backends import Backend
from vramcast.dataset_builder.backends.cuda.gpu_probes import GpuProbes
from vramcast.dataset_builder.backends.cuda.probe_child import library_workspaces
from vramcast.dataset_builder.backends.virtual import VirtualBackend, trace_spec
from vramcast.dataset_builder.configuration import make_cuda
from vramcast.device.calibration.agreement import agreement
from vramcast.device.calibration.probes import Measure, Probe
from vramcast.device.calibration.probing import RuleSearch
from vramcast.device.calibration.rows import Calibration, Sample, calibrate
from vramcast.jobs.families import make_spec
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.profile import ConvolutionWorkspace, DeviceProfile
from vramcast.virtual_gpu.training.setup import TrainingSetup

_AGREEMENT_CALLS = 20_000


def from_gpu(name: str, start: DeviceProfile, seed: int) -> Calibration:
    """Measure probes and a few rows on this machine's GPU; an interrupted run resumes."""
    probes = GpuProbes(Path("rows/calibrate") / f"{name}.jsonl")
    backend = make_cuda({}).lanes()[0]
    search = RuleSearch(_reported(probes), seed)
    search.run()
    return _with_constants(replace(from_scratch(start), **probes.libraries), search, backend)


def from_device(truth: DeviceProfile, seed: int) -> Calibration:
    """Calibrate to the virtual GPU with a profile that the search does not see, and print what it recovers."""
    search = RuleSearch(_reported(lambda probes: {item: truth.workspace_bytes(item.call) for item in probes}), seed)
    search.run()
    with CudaEmulation(truth, options=AllocatorOptions()):
        libraries: dict[str, Any] = library_workspaces()
    result = _with_constants(replace(from_scratch(truth), **libraries), search, VirtualBackend(truth))
    probed = search.learned.keys() | search.checked.keys()
    for line in agreement(truth, result.profile, probed, _AGREEMENT_CALLS, seed).lines():
        print(line)
    return replace(result, evidence=(f"simulated with {truth.name}: {result.evidence[0]}", *result.evidence[1:]))


def _reported(measure: Measure) -> Measure:
    """Return a measurement of probes that prints how many it measures."""

    def measured(probes: Sequence[Probe]) -> Mapping[Probe, int]:
        if probes:
            print(f"note: measuring {len(probes)} probes", file=sys.stderr)
        return measure(probes)

    return measured


def _with_constants(bare: DeviceProfile, search: RuleSearch, backend: Backend) -> Calibration:
    """Fit the constants to a few small rows, whose reserved memory is known."""
    profile = replace(bare, convolution=search.rules, align_channels=search.align)
    samples = []
    for spec in constant_specs():
        measurement = backend.measure(spec).measurement
        if measurement.status is Status.OK and measurement.device_used_bytes:
            trace = trace_spec(spec, bare.compute_capability)
            samples.append(Sample(trace, measurement.device_used_bytes, measurement.reserved_bytes))
    result = calibrate(profile, samples, rules=False)
    summary = f"rules from {len(search.learned)} probes; {search.shares[-1]:.1%} of the last random probes take what "
    summary += f"they say; channels are padded to {search.align}"
    return replace(result, evidence=(summary, *search.evidence()))


def constant_specs() -> list[Spec]:
    """Return small specs without convolutions, with them, and with batch norm as well."""
    setups = [TrainingSetup(batch_size=size) for size in (8, 16, 32)]
    mlp = {"arch": "uniform", "input_features": 64, "output_features": 10, "depth": 2}
    cnn = {"arch": "uniform", "input_channels": 3, "input_size": 32, "num_classes": 10, "depth": 2, "base_filters": 16}
    networks: list[tuple[str, dict[str, Any]]] = [("mlp", mlp), ("cnn", cnn), ("cnn", {**cnn, "norm": "batch"})]
    return [make_spec(family, network, setup) for family, network in networks for setup in setups]


def from_scratch(profile: DeviceProfile) -> DeviceProfile:
    """Return a profile without fitted constants, and with one copy for all convolutions."""
    bare = replace(profile.without_rules, context_mib=0, cudnn_mib=0, batch_norm_mib=0, other_mib=0, align_channels=4)
    return replace(bare, convolution=(ConvolutionWorkspace(copies=1.0),), cudnn_release=None, calibrated_on=None)
