"""ms-swift's runs as jobs, and orders of batches under `vramcast run`."""

import statistics
import sys

import pytest

from benchmarks.published.job import PublishedJob
from benchmarks.published.swift import _lengths, job_of
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.simulation.result import OrderPeaks, with_orders
from vramcast.simulation.scripts.client import RunOptions, run_script
from vramcast.simulation.scripts.command_line import parse_command
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.replay.length_orders import LengthOrders

RECORD = {
    "source": "ms-swift Benchmark.md", "model": "qwen-7b-chat", "task": "cls-fudan-news-zh, grad accum 16",
    "n_gpus": "1", "micro_batch": "2", "seq_len": "<= 1024 (cap)", "dtype": "bf16", "checkpointing": "yes",
    "peft": "LoRA r=8 targets=DEFAULT (c_attn)", "attention": "flash_attn 2.3.4", "value_gib": "30.5", "outcome": "ok",
}  # fmt: skip


def test_a_run_has_the_lengths_that_are_left_after_deletion():
    job = job_of(RECORD)
    assert isinstance(job, PublishedJob)
    assert job.parameters["accumulate"] == 4 and job.orders.accumulate == 8
    assert job.parameters["lengths"] == [*job.orders.traced, job.orders.traced[-1]]
    assert max(map(max, job.orders.orders)) <= 1024
    assert job.parameters["lora"]["target_modules"] == ["c_attn"]
    assert job.published_bytes == 30.5 * 2**30


def test_the_assumed_lengths_have_the_published_moments():
    lengths = _lengths()
    assert len(lengths) == 4959 and min(lengths) >= 91 and max(lengths) <= 19548
    assert statistics.mean(lengths) == pytest.approx(3234, rel=0.05)
    assert statistics.pstdev(lengths) == pytest.approx(2547, rel=0.1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_gpus": "2"}, "more than one GPU"),
        ({"outcome": "oom"}, "ran out of memory"),
        ({"task": "ms-agent mix 2.0"}, "mixed dataset"),
        ({"model": "chatglm3-6b"}, "in no package: chatglm3-6b"),
        ({"dtype": "int4 (gptq)"}, "quantised base"),
        ({"attention": "no flash attn"}, "attention of code"),
    ],
)
def test_rows_that_cannot_be_rebuilt_are_left_out_with_a_reason(change, reason):
    assert reason in job_of({**RECORD, **change})


def test_targets_that_are_not_the_default_are_refused():
    with pytest.raises(ValueError, match="no rank"):
        job_of({**RECORD, "peft": "adalora rank=8"})


SCRIPT = """
import sys, torch
from torch import nn

network = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 20000)).to("cuda")
optimizer = torch.optim.AdamW(network.parameters())
for length in map(int, sys.argv[1:]):
    out = network(torch.zeros(1, length, dtype=torch.long, device="cuda"))
    out.logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_replayed_with_orders_of_batches(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    orders = LengthOrders.of_samples([200, 300, 500, 800, 1001], 1, count=3)
    steps = [*orders.traced, orders.traced[-1]]
    command = [sys.executable, str(path), *map(str, steps)]
    report = run_script(parse_command(command), load_profile("a100_40gb"), [], RunOptions(steps=100, orders=orders))
    assert report.failure is None and len(report.reserved_by_order) == 3
    assert all(peak > 2 * 1001 * 20_000 * 4 for peak in report.reserved_by_order)
    device = "a100_40gb"
    varied = with_orders(report.simulation, device, OrderPeaks(report.reserved_by_order)).peaks[device]
    assert varied.bounded.reserved_bytes == sorted(report.reserved_by_order)[1]
    longest = report.simulation.peaks[device].bounded
    assert varied.orders.longest_bytes == longest.reserved_bytes
    more = varied.bounded.reserved_bytes - longest.reserved_bytes
    assert varied.bounded.device_used_bytes == longest.device_used_bytes + more
    full = with_orders(report.simulation, device, OrderPeaks((None, None, 1)))
    assert full.peaks[device].bounded.status is Status.OOM


def test_a_script_with_too_few_steps_has_no_orders(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    orders = LengthOrders.of_samples([200, 300], 1, count=1)
    with pytest.raises(UserError, match="expected 6 steps"):
        run_script(
            parse_command([sys.executable, str(path), "200"]), load_profile("a100_40gb"), [], RunOptions(orders=orders)
        )
