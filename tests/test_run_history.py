"""Long runs: the trace is bounded, and the peak and what is alive there are those of the whole run."""

import pytest
import torch
from torch import nn

from vramcast.device.profiles import load_profile
from vramcast.simulation.scripts.observation import report_of
from vramcast.virtual_gpu.cuda import trace_history
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.replay.timeline import timeline_of

A100 = load_profile("a100_40gb")
LENGTHS = [16, 24, 8, 64, 24, 16] + [16, 32, 8, 24] * 30
"""The peak is in the fourth step of many."""


def trained(monkeypatch, most_events, lengths=LENGTHS, side_stream=False):
    monkeypatch.setattr(trace_history, "MOST_EVENTS", most_events)
    gpu = CudaEmulation(A100)
    with gpu:
        network = nn.Sequential(nn.Conv1d(8, 64, 3, padding=1), nn.ReLU(), nn.Conv1d(64, 8, 3, padding=1)).cuda()
        optimizer = torch.optim.Adam(network.parameters())
        stream = torch.cuda.Stream()
        longest = 0
        for length in lengths:
            if side_stream:
                with torch.cuda.stream(stream):
                    x = torch.randn(512, 8, length, device="cuda")
                torch.cuda.current_stream().wait_stream(stream)
                x.record_stream(torch.cuda.current_stream())
            else:
                x = torch.randn(512, 8, length, device="cuda")
            loss = network(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            longest = max(longest, len(gpu.tracer.trace.events))
        return gpu, report_of(gpu, [load_profile("rtx_4090")], ending="the script ended"), longest


def test_a_shortened_trace_has_the_peak_of_the_whole_run(monkeypatch):
    _, whole, most = trained(monkeypatch, 10**9)
    gpu, short, longest = trained(monkeypatch, 1500)
    assert gpu.history.dropped_events > 0 and longest < 1700 < most / 3, "the trace stays below its limit"
    assert len(gpu.tracer.trace.uses) < 1200, "numbers of blocks are used again"
    assert len(gpu.tracer.trace.calls) < 100, "equal calls are stored once"
    for name in ("phases", "steps", "lines"):
        assert getattr(short, name) == getattr(whole, name)
    assert short.simulation.peaks["a100_40gb"] == whole.simulation.peaks["a100_40gb"]
    assert short.simulation.costs == whole.simulation.costs
    other, expected = (item.simulation.peaks["rtx_4090"].bounded for item in (short, whole))
    assert other.allocated_bytes == expected.allocated_bytes
    assert other.reserved_bytes == pytest.approx(expected.reserved_bytes, rel=0.05)


def test_operations_on_streams_are_dropped_with_their_stretches(monkeypatch):
    gpu, report, longest = trained(monkeypatch, 1500, side_stream=True)
    assert longest < 2500 and len(gpu.tracer.trace.stream_operations) < 3 * len(LENGTHS)
    assert report.simulation.peaks["a100_40gb"].bounded.allocated_bytes == gpu.record.peak.allocated_bytes
    assert len(report.steps) == len(LENGTHS)


def test_a_shortened_trace_is_consistent_and_so_is_its_snapshot(monkeypatch):
    gpu, report, _ = trained(monkeypatch, 1500)
    live = set()
    for block, size in gpu.tracer.trace.events:
        if block >= 0 and size == FREE:
            live.remove(block)
        elif block >= 0:
            assert block not in live
            live.add(block)
    entries = gpu.snapshot()["device_traces"][0]
    held, highest = 0, 0
    for entry in entries:
        held += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        highest = max(highest, held)
    course = timeline_of(gpu.tracer.trace, A100, gpu.options)
    assert highest == max(map(sum, zip(*course.requested_bytes.values(), strict=True)))
    assert highest == report.simulation.peaks["a100_40gb"].bounded.requested_bytes
