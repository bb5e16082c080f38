"""Networks and traces of ranks, with the sums that tests compare."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vramcast.jobs.families.libraries import import_library
from vramcast.virtual_gpu.allocator.allocator import CachingAllocator
from vramcast.virtual_gpu.distributed.parallelism import Parallelism
from vramcast.virtual_gpu.distributed.rank_session import trace_rank
from vramcast.virtual_gpu.replay.replay import FREE, Replay, replay
from vramcast.virtual_gpu.tracing.trace import Trace, call_of
from vramcast.virtual_gpu.training.setup import TrainingSetup

Make = Callable[[], nn.Module]


def mlp(width: int = 1024, blocks: int = 4, outputs: int = 16) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.Linear(width, outputs, bias=False))


def rows(width: int = 1024) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (torch.randn(size, width, device="meta"),)


def tokens(length: int = 64) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (torch.randint(100, (size, length), device="meta"),)


class OwnLoss(nn.Module):
    """A language model that is trained on its own tokens."""

    def __init__(self, subject: nn.Module) -> None:
        super().__init__()
        self.subject = subject

    def forward(self, batch: Tensor) -> Any:
        return self.subject(input_ids=batch, labels=batch)


def llama(layers: int = 2, heads: int = 4, checkpointing: bool = False, hidden: int = 64) -> nn.Module:
    transformers = import_library("transformers")
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=2 * hidden, vocab_size=256, use_cache=False,
    )  # fmt: skip
    network = transformers.LlamaForCausalLM(config)
    if checkpointing:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return OwnLoss(network)


def rank_trace(
    make: Make,
    inputs: Callable[[int], tuple[Any, ...]],
    strategy: str,
    world_size: int = 4,
    rank: int = 0,
    training: dict[str, Any] | None = None,
    **options: Any,
) -> Trace:
    with torch.device("meta"):
        network = make().train()
    setup = TrainingSetup(**{"batch_size": 4, **(training or {})})
    return trace_rank(network, inputs, setup, Parallelism(strategy=strategy, world_size=world_size, **options), rank)


def replayed(trace: Trace) -> Replay:
    """Replay a trace without workspaces of libraries."""
    events = [(block, size if block < 0 or call_of(size) is None else 0) for block, size in trace.events]
    return replay(events, CachingAllocator(), streams=trace.streams, operations=trace.stream_operations)


def peak_requested(trace: Trace) -> int:
    """Return the largest sum of live blocks, without workspaces of libraries."""
    live: dict[int, int] = {}
    total = peak = 0
    for block, size in trace.events:
        if block >= 0 and size == FREE:
            total -= live.pop(block)
        elif block >= 0:
            live[block] = max(size, 0)
            total += live[block]
            peak = max(peak, total)
    return peak


def held_by_use(trace: Trace) -> dict[int, int]:
    """Return the bytes that are alive at the end, by use."""
    live: dict[int, int] = {}
    for block, size in trace.events:
        if block >= 0 and size == FREE:
            live.pop(block)
        elif block >= 0:
            live[block] = max(size, 0)
    totals: dict[int, int] = {}
    for block, size in live.items():
        totals[trace.uses[block]] = totals.get(trace.uses[block], 0) + size
    return totals
