"""`vramcast run` with torchrun: ranks of a script on several GPUs, against the traces of the same strategy."""

import json
import sys
from pathlib import Path

import pytest
from rank_traces import mlp, rank_trace, rows
from warm_runs import HOST

from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.allocator import CachingAllocator
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.distributed.distinct_ranks import extremes
from vramcast.virtual_gpu.distributed.parallelism import RankGroup
from vramcast.virtual_gpu.distributed.script_groups import RankObserver
from vramcast.virtual_gpu.replay.replay import replay
from vramcast.virtual_gpu.replay.simulate import lower

SCRIPTS = Path(__file__).parent / "scripts"


def run(*words, options=()):
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return HOST.run("--json", "--device", "a100_40gb", *options, "--", *launcher, *words)


def allocated_mib(strategy, **training):
    trace = rank_trace(mlp, rows(), strategy, training=training)
    events = lower(trace, load_profile("a100_40gb")).events
    result = replay(events, CachingAllocator(), streams=trace.streams, operations=trace.stream_operations)
    return result.peak_allocated_bytes / MIB


@pytest.mark.parametrize(
    ("strategy", "words", "optimizer"),
    [
        ("ddp", ["ranks_ddp.py"], "SGD"),
        ("fsdp2", ["ranks_fsdp.py"], "Adam"),
        ("fsdp1", ["ranks_fsdp.py", "--flat"], "Adam"),
    ],
)
def test_a_rank_of_a_script_takes_what_its_strategy_takes(strategy, words, optimizer):
    launched = ["--nproc_per_node", "4", str(SCRIPTS / words[0]), *words[1:]]
    code, out, _ = run(*launched, options=["--rank", "0"])
    assert code == 0
    answer = json.loads(out)
    assert answer["allocated_mib"] == pytest.approx(allocated_mib(strategy, optimizer=optimizer), rel=0.01)
    assert any("NCCL" in note for note in answer["notes"])


def test_a_rank_can_be_named():
    code, out, error = run(
        "--nproc_per_node", "2", "--nnodes", "2", str(SCRIPTS / "ranks_ddp.py"), options=["--rank", "3"]
    )
    assert code == 0
    assert "rank 3 alone is simulated" in out
    code, _, error = run("--nproc_per_node", "2", str(SCRIPTS / "ranks_ddp.py"), options=["--rank", "2"])
    assert code == 2
    assert "expected a rank below 2, found 2" in error


def test_stages_of_a_pipeline_are_simulated_one_by_one():
    code, out, _ = run("--nproc_per_node", "2", str(SCRIPTS / "ranks_pipeline.py"))
    assert code == 0
    answer = json.loads(out)
    second, first = answer["ranks"]
    assert (second["rank"], second["count"], first["rank"], first["count"]) == (1, 1, 0, 1)
    assert answer["allocated_mib"] == second["allocated_mib"]
    state_mib = 3 * 4 * 1024 * 1025 * 4 / MIB  # parameters, two moments, and gradients of three more layers
    assert second["allocated_mib"] - first["allocated_mib"] == pytest.approx(state_mib, rel=0.35)


def test_partitions_and_uneven_shards_name_the_ranks_that_differ():
    assert extremes([5, 3, 3, 5]) == (RankGroup(0, 2), RankGroup(1, 2))
    assert RankObserver(8).groups([]) == (RankGroup(0, 1), RankGroup(7, 7))


def test_lightning_starts_no_process_and_its_equal_ranks_are_one_group():
    pytest.importorskip("lightning")
    script = str(SCRIPTS / "ranks_lightning.py")
    code, out, err = HOST.run("--json", "--device", "a100_40gb", "--", sys.executable, script, "fsdp")
    assert code == 0
    assert "vramcast run: rank 3 of 4" in err
    answer = json.loads(out)
    assert [(item["rank"], item["count"]) for item in answer["ranks"]] == [(0, 4)]
    assert answer["allocated_mib"] == pytest.approx(allocated_mib("fsdp1", optimizer="Adam"), rel=0.08)
