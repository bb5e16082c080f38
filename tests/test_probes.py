"""Rules from probes: every rule of the shipped sets is found again, on calls that were no probes."""

import random
from dataclasses import asdict, replace

import pytest
import yaml
from rule_searches import check_recovery, profile_with, searched

from vramcast.commands.device.device_command import main
from vramcast.dataset_builder.backends.cuda.gpu_probes import GpuProbes
from vramcast.dataset_builder.backends.cuda.probe_child import convolution_workspace, library_workspaces
from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.dataset_builder.golden import golden_specs
from vramcast.device.calibration.agreement import agreement
from vramcast.device.calibration.probes import design, random_probes
from vramcast.device.profiles import CONF, load_profile, read_rules
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.profile import ConvolutionWorkspace, parse_profile
from vramcast.virtual_gpu.replay.simulate import simulate

SETS = {path.stem for path in (CONF / "device" / "rules").glob("*.yaml")}
SLOWEST = "gpumemnet_2024"
"""Its search takes half a minute: benchmarks/tests/test_rule_searches.py."""


@pytest.mark.parametrize("name", sorted(SETS - {SLOWEST}))
def test_every_rule_of_a_shipped_set_is_recovered(name):
    check_recovery(name)


def test_another_alignment_and_other_amounts_are_found():
    rules = [{"direction": "weight", "aligned": False, "copies": 0.5, "extra_mib": 12}, {"copies": 3.0}]
    search, _ = searched(profile_with(rules, align=8))
    assert search.align == 8
    assert {(rule.copies, rule.extra_mib) for rule in search.rules} == {(0.5, 12), (3.0, 0)}


def test_disturbed_probes_do_not_decide(monkeypatch):
    monkeypatch.setattr("vramcast.device.calibration.probing._MOST_ROUNDS", 2)
    source = random.Random(0)
    truth = profile_with(read_rules("cudnn9_ampere_consumer")["convolution"])
    search, profile = searched(truth, lambda size: size + (source.random() < 0.01) * source.randint(1, 40 * MIB))
    result = agreement(truth, profile, (), 2000, seed=1)
    assert result.equal > 0.99 * result.calls
    assert search.wrong(search.checked), "the disturbed probes"


def test_a_wrong_and_an_unreachable_rule_are_reported():
    rules = [{"grouped": True, "copies": 0.0}, {"depthwise": True, "copies": 2.0}, {"copies": 1.0}]
    other = replace(profile_with([]), convolution=(ConvolutionWorkspace(copies=1.0),))
    result = agreement(profile_with(rules), other, (), 500, seed=0)
    assert [rule.verdict for rule in result.rules] == ["differs", "unreachable", "recovered"]
    assert result.equal < result.calls


def test_the_child_measures_workspaces_to_the_byte():
    profile = load_profile("a100_40gb_gpumemnet_2024")
    with CudaEmulation(profile, options=AllocatorOptions()):
        libraries = library_workspaces()
        probes = random_probes(60, random.Random(3))
        sizes = [convolution_workspace(probe.call) for probe in probes]
    assert libraries["cublas_workspace_bytes"] == profile.cublas_workspace_bytes
    assert libraries["cublaslt_workspace_bytes"] == profile.cublaslt_workspace_bytes
    assert sizes == [profile.workspace_bytes(probe.call) for probe in probes]
    assert len(set(sizes)) > 20


def test_measured_probes_are_kept_and_not_measured_again(tmp_path, monkeypatch):
    probes, requests = design(6, seed=0), []

    def measure(self, new):
        requests.append(len(new))
        return {"event": "result", "workspaces": [None, *range(1, len(new))], "cublas_workspace_bytes": 7}

    monkeypatch.setattr(GpuProbes, "_measure", measure)
    first = GpuProbes(tmp_path / "probes.jsonl")
    assert first(probes) == dict(zip(probes[1:], range(1, 6), strict=True)), "the GPU was too small for one"
    again = GpuProbes(tmp_path / "probes.jsonl")
    assert again(probes) == first(probes)
    assert again.libraries == {"cublas_workspace_bytes": 7}
    assert requests == [6]


def test_the_command_recovers_a_device_from_the_virtual_gpu(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    assert main(["calibrate", "mine", "--from-device", "rtx_4060", "-o", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["recovered"] * 4
    truth, mine = load_profile("rtx_4060"), parse_profile(yaml.safe_load(path.read_text()))
    fitted = ("context_mib", "cudnn_mib", "batch_norm_mib", "align_channels", "cublas_workspace_bytes")
    assert [asdict(mine)[name] for name in fitted] == [asdict(truth)[name] for name in fitted]
    trace = trace_spec(golden_specs()["mobilenet"], truth.compute_capability)
    peaks = [simulate(trace, profile, AllocatorOptions()).device_used_bytes for profile in (truth, mine)]
    assert peaks[0] == peaks[1]


def test_a_narrow_band_of_channels_is_an_exception_to_a_rule():
    """Random probes hardly ever meet it, and probes along the channels do."""
    band = {"direction": "forward", "min_input_channels": 1500, "max_input_channels": 1530}
    truth = profile_with(
        [{"pointwise": True, "copies": 0.0}, {**band, "copies": 1.0, "partial_sums": 3}, {"copies": 1.0}]
    )
    search, profile = searched(truth)
    result = agreement(truth, profile, (), 2000, seed=1)
    assert result.equal == result.calls
    assert [rule.verdict for rule in result.rules[:2]] == ["recovered", "recovered"]
    assert all(rule.equal > 0.99 * rule.calls > 50 for rule in result.rules)  # limits to a few channels
    assert [rule.partial_sums for rule in search.rules].count(3) == 1
