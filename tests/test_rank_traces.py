"""Traces of ranks: shards, buckets and partitions counted by hand, and torch's own tracker."""

from functools import partial

import pytest
import torch
from rank_traces import held_by_use, llama, mlp, peak_requested, rank_trace, replayed, rows, tokens
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from vramcast.jobs.families.libraries import import_library
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.allocator.streams import RecordStream
from vramcast.virtual_gpu.distributed.distinct_ranks import distinct_ranks
from vramcast.virtual_gpu.distributed.parallelism import Parallelism, RankGroup
from vramcast.virtual_gpu.distributed.rank_context import rank_context
from vramcast.virtual_gpu.distributed.rank_session import trace_rank
from vramcast.virtual_gpu.distributed.rank_tracer import RankTracer
from vramcast.virtual_gpu.distributed.strategies import parallelize
from vramcast.virtual_gpu.replay.replay import FREE, STREAM_OPERATION
from vramcast.virtual_gpu.tracing.trace import Use
from vramcast.virtual_gpu.training.setup import TrainingSetup
from vramcast.virtual_gpu.training.step import make_optimizer, training_steps

ADAM_STEP_BYTES = 4  # a scalar for each parameter, on the host or on the device


def parameters(make) -> list[int]:
    with torch.device("meta"):
        return [item.numel() for item in make().parameters()]


def test_fsdp2_holds_a_shard_of_parameters_gradients_and_state() -> None:
    trace = rank_trace(mlp, rows(), "fsdp2", world_size=4)
    held, elements = held_by_use(trace), sum(parameters(mlp))
    assert held[Use.PARAMETERS] == elements  # 4 bytes on 4 ranks
    assert held[Use.GRADIENTS] == elements
    assert 2 * elements <= held[Use.OPTIMIZER_STATE] <= 2 * elements + 64


def test_fsdp2_gathers_one_block_ahead_by_hand() -> None:
    """SGD: shards and gradients (1/4 each), two gathered blocks in the copy-in stream and one copied out."""
    trace = rank_trace(mlp, rows(), "fsdp2", training={"optimizer": "SGD"})
    assert set(trace.streams.values()) == {1, 3}  # copy-in (all-gather output), reduce-scatter output
    gathered = [size for block, size in trace.events if trace.streams.get(block) == 1 and size != FREE]
    assert max(gathered) == 4 * MIB  # a block of 1024 x 1024 in fp32
    reduced = [size for block, size in trace.events if trace.streams.get(block) == 3 and size != FREE]
    assert max(reduced) == MIB


def test_a_bf16_policy_gathers_in_bf16_and_reduces_in_fp32() -> None:
    trace = rank_trace(mlp, rows(), "fsdp2", training={"autocast": "bf16", "optimizer": "SGD"})
    gathered = [size for block, size in trace.events if trace.streams.get(block) == 1 and size != FREE]
    reduced = [size for block, size in trace.events if trace.streams.get(block) == 3 and size != FREE]
    assert (max(gathered), max(reduced)) == (2 * MIB, MIB)


def test_parameters_that_are_not_freed_after_the_forward_pass_add_up() -> None:
    freed, kept = (
        peak_requested(rank_trace(mlp, rows(), "fsdp2", shard_after_forward=after, training={"optimizer": "SGD"}))
        for after in (True, False)
    )
    assert 4 * MIB < kept - freed < 3 * 4 * MIB  # of four blocks, one or two more are whole at the peak


def test_parameters_of_the_root_stay_whole_between_the_passes_by_default() -> None:
    """The peak is at the loss, where blocks are sharded. The root, an output layer of 16 MiB, is not, as in torch."""
    freed, kept = (
        peak_requested(
            rank_trace(
                partial(mlp, blocks=2, outputs=4096), rows(), "fsdp2", shard_after_forward=after,
                training={"optimizer": "SGD", "batch_size": 4096},
            )
        )
        for after in (True, False)
    )  # fmt: skip
    assert kept - freed == pytest.approx(2 * 4 * MIB, rel=0.01)  # two blocks of 1024 x 1024


def test_resharding_to_fewer_ranks_lies_between() -> None:
    peaks = [
        peak_requested(rank_trace(mlp, rows(), "fsdp2", shard_after_forward=after, training={"optimizer": "SGD"}))
        for after in (True, 2, False)
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[2]


def test_hsdp_shards_within_a_node() -> None:
    held = held_by_use(rank_trace(mlp, rows(), "hsdp", world_size=8, nodes=2))
    assert held[Use.PARAMETERS] == sum(parameters(mlp))  # 4 bytes on the 4 ranks of a node


def test_offloaded_parameters_are_in_host_memory() -> None:
    trace = rank_trace(mlp, rows(), "fsdp2", offload=True)
    held = held_by_use(trace)
    assert Use.PARAMETERS not in held
    assert Use.OPTIMIZER_STATE not in held
    assert peak_requested(trace) < peak_requested(rank_trace(mlp, rows(), "fsdp2"))


def test_shards_are_padded_to_whole_rows() -> None:
    held = [held_by_use(rank_trace(mlp, rows(), "fsdp2", world_size=size))[Use.PARAMETERS] for size in (2, 8, 64)]
    blocks, head = 4 * 1024 * 1024 * 4, 16 * 1024 * 4
    assert held == [(blocks + head) // 2, (blocks + head) // 8, blocks // 64 + head // 16]  # 16 rows on 64 ranks


def linear(*sizes: tuple[int, int]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


BUCKETS = [
    # all gradients fit into the first bucket of 1 MiB: one bucket before and after
    (((64, 64), (64, 64)), [32768]),
    # backward order: 4 MiB closes the first bucket; then 4 + 4 + 4 of at most 25 MiB
    (((1024, 1024),) * 4, [4 * MIB, 12 * MIB]),
    # the first bucket takes 0.5 + 0.5 MiB, the next 16 + 16 (closed above 25), the last 16
    (((1024, 4096), (4096, 1024), (1024, 4096), (4096, 32), (32, 4096)), [MIB, 32 * MIB, 16 * MIB]),
]


@pytest.mark.parametrize(("sizes", "expected"), BUCKETS)
def test_ddp_buckets_by_hand(sizes, expected) -> None:
    total = sum(4 * left * right for left, right in sizes)
    trace = rank_trace(lambda: linear(*sizes), rows(sizes[0][0]), "ddp", training={"optimizer": "SGD"})
    shapes = {4 * left * right for left, right in sizes}
    owned = [
        size for block, size in trace.events
        if block >= 0 and size > 0 and trace.uses[block] == Use.GRADIENTS and not trace.owners[block]
    ]  # fmt: skip
    assert owned[0] == total  # in the constructor: one bucket for all
    assert sorted(owned[1:]) == sorted(expected)  # rebuilt after the first step
    held = held_by_use(trace)
    assert held[Use.GRADIENTS] == 2 * total  # the gradients themselves, and the buckets
    assert held[Use.PARAMETERS] == total
    assert shapes


def test_zero1_holds_the_state_of_its_partition() -> None:
    sizes = [1024 * 1024] * 4 + [1024 * 16]
    held = held_by_use(rank_trace(mlp, rows(), "zero1", world_size=4))
    assert held[Use.PARAMETERS] == 4 * sum(sizes)
    most = 2 * 4 * (1024 * 1024 + 1024 * 16)  # one of four equal blocks, and the last layer
    assert held[Use.OPTIMIZER_STATE] <= most + 64
    assert held[Use.OPTIMIZER_STATE] >= 2 * 4 * 1024 * 1024


def test_fsdp1_frees_gathered_parameters_by_events() -> None:
    trace = rank_trace(mlp, rows(), "fsdp1", world_size=4)
    recorded = [item for item in trace.stream_operations if isinstance(item, RecordStream)]
    assert recorded
    assert any(block == STREAM_OPERATION for block, _ in trace.events)
    result = replayed(trace)
    assert result.peak_active_bytes > result.peak_allocated_bytes
    held = held_by_use(trace)
    assert held[Use.PARAMETERS] == sum(parameters(mlp))


def test_fsdp1_holds_whole_gradients_until_the_last_microbatch() -> None:
    """As in accelerate: gradients are reduced once a step, and those of the first microbatch are whole until then."""
    once, twice = (
        peak_requested(rank_trace(mlp, rows(), "fsdp1", training={"optimizer": "SGD", "accumulate": count}))
        for count in (1, 2)
    )
    assert twice - once > 0.6 * 4 * sum(parameters(mlp))  # of four shards, three more
    assert held_by_use(rank_trace(mlp, rows(), "fsdp1", training={"accumulate": 2}))[Use.GRADIENTS] == sum(
        parameters(mlp)
    )


def test_tensor_parallel_layers_hold_a_part() -> None:
    whole, part = (held_by_use(rank_trace(llama, tokens(), "tp", world_size=size, training={"loss": "own"}))
                   for size in (1, 2))  # fmt: skip
    split = 2 * (4 * 64 * 64 + 3 * 64 * 128) * 4  # projections of attention and MLP of two layers
    assert whole[Use.PARAMETERS] - part[Use.PARAMETERS] == split // 2


def test_fsdp2_over_tensor_parallel_layers_holds_both_parts() -> None:
    held = held_by_use(rank_trace(llama, tokens(), "fsdp2", world_size=4, tensor=2, training={"loss": "own"}))
    plain = held_by_use(rank_trace(llama, tokens(), "fsdp2", world_size=2, training={"loss": "own"}))
    split = 2 * (4 * 64 * 64 + 3 * 64 * 128) * 4
    assert plain[Use.PARAMETERS] - held[Use.PARAMETERS] == split // 4


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_of_a_pipeline_hold_their_layers(schedule) -> None:
    options = {"world_size": 2, "schedule": schedule, "training": {"loss": "own"}}
    first, last = (
        held_by_use(rank_trace(llama, tokens(), "pp", rank=rank, **options))[Use.PARAMETERS] for rank in (0, 1)
    )
    layer = 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    embedding, norm = 4 * 256 * 64, 4 * 64
    rotary = 2 * 4 * 8  # two buffers of half a head
    assert first == layer + embedding + rotary
    assert last == layer + embedding + norm + rotary


def test_gpipe_keeps_all_microbatches_and_1f1b_those_in_flight() -> None:
    options = {"world_size": 2, "microbatches": 8, "training": {"batch_size": 8, "loss": "own"}}
    last = [peak_requested(rank_trace(llama, tokens(), "pp", rank=1, schedule=item, **options))
            for item in ("1f1b", "gpipe")]  # fmt: skip
    assert last[0] < last[1]


def test_zero2_and_zero3_follow_the_partitioning_rules() -> None:
    elements = sum(parameters(mlp))
    setup = {"autocast": "bf16"}
    stage2, stage3 = (held_by_use(rank_trace(mlp, rows(), name, training=setup)) for name in ("zero2", "zero3"))
    assert stage2[Use.PARAMETERS] == 2 * elements + 4 * elements // 4
    assert stage3[Use.PARAMETERS] == 2 * elements // 4 + 2 * elements + 4 * elements // 4  # all fit into live ones
    assert 2 * elements <= stage2[Use.OPTIMIZER_STATE] <= 2 * elements + 64
    trace = rank_trace(mlp, rows(), "zero3", training=setup)
    assert any("modelled" in phrase for phrase in trace.approximations)


TRACKED = {
    "mlp": (mlp, rows(), {}),
    "llama": (llama, tokens(), {"loss": "own"}),
    "llama, checkpointing": (lambda: llama(checkpointing=True), tokens(), {"loss": "own"}),
    "vit": (
        lambda: import_library("timm").create_model("vit_tiny_patch16_224", depth=2),
        lambda size: (torch.randn(size, 3, 224, 224, device="meta"),),
        {},
    ),
}


@pytest.mark.parametrize("name", TRACKED)
def test_peaks_agree_with_torchs_own_tracker(name) -> None:
    make, inputs, training = TRACKED[name]
    setup = TrainingSetup(batch_size=4, autocast="bf16", **training)
    parallelism = Parallelism(strategy="fsdp2", world_size=4)
    with torch.device("meta"):
        ours, theirs = make().train(), make().train()
    trace = trace_rank(ours, inputs, setup, parallelism)
    tracer = RankTracer({})
    with rank_context(tracer, 0, 4, 8.0):
        network = theirs.subject if hasattr(theirs, "subject") else theirs
        with RankTracer({}):
            parallelize(network, parallelism, setup, tracer)
        optimizer = make_optimizer("Adam", {}, "foreach", theirs.parameters())
        tracker = FSDPMemTracker(network, optimizer)
        batches = ([inputs(4)] for _ in range(3))
        with RankTracer({}), tracker:
            for _ in training_steps(theirs, optimizer, batches, setup.loss):
                tracker.reset_mod_stats()
    snapshot = tracker.get_tracker_snapshot("peak")
    tracked = max(value for item in snapshot.values() for use, value in item.items() if "Total" in str(use))
    assert peak_requested(trace) == pytest.approx(tracked, rel=0.001)


def test_all_patches_are_undone() -> None:
    before = {name: getattr(owner, name) for owner, name in patched()}
    rank_trace(mlp, rows(), "fsdp1")
    assert {name: getattr(owner, name) for owner, name in patched()} == before
    assert not hasattr(torch, "meta")
    assert not torch.distributed.is_initialized()


def patched():
    from torch.distributed.fsdp import _flat_param, _init_utils, _runtime_utils, fully_sharded_data_parallel
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.nn.parallel import distributed

    return [
        (torch.UntypedStorage, "resize_"),
        (FSDPParamGroup, "_validate_no_meta_params"),
        (_init_utils, "_need_to_materialize_module"),
        (fully_sharded_data_parallel, "_init_device_handle"),
        (_flat_param, "_no_dispatch_record_stream"),
        (_runtime_utils, "_no_dispatch_record_stream"),
        (distributed, "_sync_module_states"),
        (distributed, "_verify_param_shape_across_processes"),
        (_PipelineSchedule, "_warmup_p2p"),
        (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
    ]


def test_equal_ranks_are_simulated_once() -> None:
    with torch.device("meta"):
        even, uneven = mlp(), mlp(outputs=10)

    def ranks(network, strategy, **options):
        return distinct_ranks(network, Parallelism(strategy=strategy, world_size=8, **options))

    assert ranks(even, "ddp") == ranks(even, "fsdp2") == ranks(uneven, "fsdp1") == (RankGroup(0, 8),)
    assert ranks(uneven, "fsdp2") == (RankGroup(0, 7), RankGroup(7, 1))
    assert ranks(even, "zero1") == (RankGroup(0, 4), RankGroup(5, 3))  # four blocks, the head, and three of nothing
    assert [item.rank for item in ranks(even, "fsdp2", pipeline=4)] == [0, 2, 4, 6]


def test_the_last_rank_of_an_uneven_shard_holds_less_state() -> None:
    first, last = (
        held_by_use(rank_trace(lambda: mlp(outputs=9), rows(), "fsdp2", world_size=4, rank=rank)) for rank in (0, 3)
    )
    assert first[Use.OPTIMIZER_STATE] - last[Use.OPTIMIZER_STATE] == 2 * 4 * 3 * 1024  # 3 of 9 rows, against none
