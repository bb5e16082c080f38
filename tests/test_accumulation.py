"""Batches that are repeated in a trace: the events are those of batches that are traced one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vramcast.virtual_gpu.tracing import session
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.tracing.trace import Trace, call_of
from vramcast.virtual_gpu.training.setup import TrainingSetup


def _network() -> nn.Module:
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        return nn.Sequential(nn.Linear(16, 32), block, nn.Linear(32, 4))


def _batch(size: int) -> tuple[Tensor]:
    return (torch.randn(size, 8, 16, device="meta"),)


def _events(trace: Trace) -> list[tuple[int, Any]]:
    """Return events with library calls in the place of their indices."""
    calls = [(block, call_of(size) if block >= 0 else None, size) for block, size in trace.events]
    return [(block, size if index is None else trace.calls[index]) for block, index, size in calls]


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3},
        {"accumulate": 6, "optimizer": "SGD(momentum=0.9)"},
        {"accumulate": 4, "autocast": "fp16"},
        {"accumulate": 4, "last_batch_size": 1, "zero_grad": "after_step"},
    ],
)
def test_repeated_batches_equal_traced_ones(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    setup = TrainingSetup(**{"batch_size": 2, **options})
    outcomes: list[bool] = []
    original = session.repeat_batch
    monkeypatch.setattr(session, "repeat_batch", lambda *args: outcomes.append(original(*args)) or outcomes[-1])
    repeated = trace_training(_network(), _batch, setup, owners=True)
    monkeypatch.setattr(session, "repeat_batch", lambda *_: False)
    traced = trace_training(_network(), _batch, setup, owners=True)
    assert outcomes and all(outcomes)
    assert _events(repeated) == _events(traced)
    assert (repeated.uses, repeated.owners) == (traced.uses, traced.owners)


class _Hoarder(nn.Module):
    """Keeps a tensor of each batch, so that no batch replaces the tensors of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4, device="meta")
        self.hoard: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.hoard.append(out.detach().clone())
        return out


def test_batches_that_leave_more_and_more_are_traced_one_by_one() -> None:
    network = _Hoarder()
    trace_training(network, _batch, TrainingSetup(batch_size=2, accumulate=5))
    assert len(network.hoard) == 2 * 5
