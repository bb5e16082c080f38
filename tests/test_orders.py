"""The order of allocations in CUDA kernels, where torch's meta functions have another or none."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vramcast.jobs.families import blocks, make_spec, plan_of
from vramcast.jobs.families.blocks import Encoder
from vramcast.jobs.families.gpumemnet import spec_of_filename
from vramcast.jobs.subject import build_subject
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.tracing.trace import Tracer
from vramcast.virtual_gpu.training.setup import TrainingSetup

TOKENS, SIZE = 4096, 16


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="meta")


def events_of(step: Callable[[], Any], *existing: Tensor) -> list[int]:
    """Return allocations as positive sizes and frees as negative ones."""
    tracer = Tracer(cuda_kernels())
    for item in existing:
        tracer.see(item.detach())
    tracer.trace.events.clear()
    with cuda_paths(), tracer:
        step()
    sizes: dict[int, int] = {}
    events = []
    for block, size in tracer.trace.events:
        if size != FREE:
            sizes[block] = size
        events.append(size if size != FREE else -sizes.get(block, 0))
    return [size for size in events if abs(size) > 8]  # without calls and single numbers


def test_the_bias_of_a_transposed_input_is_added_in_place() -> None:
    with torch.device("meta"):
        net = nn.Linear(8, 24)
    x = numbers(4, 16, 8)
    outputs: list[Tensor] = []
    # only a contiguous copy of the input and the output
    events = events_of(lambda: outputs.append(net(x.transpose(0, 1))), x, *net.parameters())
    assert events == [4 * 16 * 8 * 4, 4 * 16 * 24 * 4]
    with torch.no_grad():
        assert outputs[0].shape == (16, 4, 24)


def test_other_linear_layers_run_as_torch_runs_them() -> None:
    with torch.device("meta"):
        plain, layer = nn.Linear(8, 24, bias=False), nn.Linear(8, 24)
    for net, shape in ((plain, (4, 16, 8)), (layer, (4, 16, 8)), (layer, (4, 8)), (layer, (8,))):
        x = numbers(*shape)
        with cuda_paths():
            assert net(x).shape == (*shape[:-1], 24)


def test_the_gradient_of_an_embedding_allocates_in_order() -> None:
    with torch.device("meta"):
        net = nn.Embedding(100, SIZE)
    tokens = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    out, weight = TOKENS * SIZE * 4, 100 * SIZE * 4
    events = events_of(lambda: net(tokens).sum().backward(), tokens, *net.parameters())
    one = TOKENS * 8
    scratch, parts = 2 * one + 4096, TOKENS // 10 + 100
    taken = [one, one, one, scratch, -scratch, -one, weight, one, 4096, -4096, 800, 800, 4096, -4096, parts * 8]
    assert events[events.index(-out) + 1 :][: len(taken)] == taken
    assert events.count(parts * 32 * 4) == 1  # sums of the parts, one warp wide


def test_an_encoder_keeps_its_input_until_the_end() -> None:
    layers = [nn.Sigmoid() for _ in range(3)]

    def most_alive(net: nn.Module) -> int:
        with torch.no_grad():
            events = events_of(lambda: net(x), x)
        return max(accumulate(1 if size > 0 else -1 for size in events))

    x = numbers(16)
    assert most_alive(nn.Sequential(nn.Tanh(), *layers)) == 2
    assert most_alive(nn.Sequential(nn.Tanh(), Encoder(*layers))) == 3


def test_checkpointing_wraps_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    network = {
        "kind": "encoder", "vocabulary": 10, "embedding_size": 8, "layers": 3, "heads": 2, "feed_forward_size": 16,
        "sequence_length": 4,
    }  # fmt: skip
    setup = TrainingSetup(batch_size=2, checkpointing=True)
    net = build_subject(plan_of(make_spec("transformer", network, setup)))
    wrapped: list[str] = []
    monkeypatch.setattr(blocks, "checkpoint", lambda block, x, **_: wrapped.append(type(block).__name__) or block(x))
    net(torch.zeros((2, 4), dtype=torch.int64, device="meta"))
    assert wrapped == ["Embedding", "LearnedPositions", *["TransformerEncoderLayer"] * 3, "Sequential"]


def test_the_batch_of_a_repeated_dry_run_is_never_freed() -> None:
    def inputs(passes: int) -> int:
        with torch.device("meta"):
            net = nn.Linear(1000, 2)
        setup = TrainingSetup(batch_size=4, dry_run_batch_size=3, dry_run_passes=passes)
        events = trace_training(net, lambda size: (numbers(size, 1000),), setup).events
        born = {block for block, size in events if size == 3 * 1000 * 4}
        assert len(born) == 1
        return len(born - {block for block, size in events if size == FREE})

    assert (inputs(1), inputs(2)) == (0, 1)


def test_a_run_that_ends_within_its_first_epoch_has_no_last_batch() -> None:
    name = (
        "num_classes:500_embedding_size:1024_num_layers:{}_num_heads:8_ff_hidden_size:2048_dropout_rate:0.2_"
        "seq_length:512_input_size:200000_num_samples:4001_batch_size:8.out"
    )
    small, large = (spec_of_filename(name.format(layers)).training for layers in (2, 30))
    assert (small.last_batch_size, large.last_batch_size) == (1, None)
