"""Checkpointing without reentry: every tensor that a block makes lives as long on the virtual GPU as on the CPU."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

_WIDTH, _HEADS, _BLOCKS = 64, 4, 3


class Log:
    """The tensors that blocks made, and those alive whenever a parameter got its gradient."""

    def __init__(self):
        self.made = []
        self.alive = []

    def keep(self, name, tensor):
        self.made.append((name, weakref.ref(tensor)))
        return tensor

    def look(self, parameter):
        self.alive.append((parameter, [name for name, tensor in self.made if tensor() is not None]))


class Block(nn.Module):
    """A block with eager attention, whose softmax is in single precision."""

    def __init__(self, name, log):
        super().__init__()
        self.name, self.log = name, log
        self.before, self.after = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.projections, self.output = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def keep(self, name, tensor):
        return self.log.keep(f"{self.name} {name}", tensor)

    def attend(self, x):
        batch, length, _ = x.shape
        q, k, v = self.projections(x).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = self.keep("scores", q @ k.transpose(-1, -2) * 0.25)
        weights = self.keep("weights", F.softmax(scores, -1, dtype=torch.float32).to(x.dtype))
        mixed = self.keep("mixed", (weights @ v).transpose(1, 2).reshape(x.shape))
        return self.keep("attention", self.output(mixed))

    def forward(self, x):
        hidden = self.keep("residual + attention", x + self.attend(self.keep("normed", self.before(x))))
        inside = self.keep("up", self.up(self.keep("normed again", self.after(hidden))))
        return self.keep("out", hidden + self.down(self.keep("activated", F.silu(inside))))


def liveness(device, reentrant):
    """Train two steps with the output alive throughout, and return what lived when."""
    log = Log()
    blocks = nn.ModuleList(Block(f"block {index}", log) for index in range(_BLOCKS)).to(device)
    optimizer = torch.optim.AdamW(blocks.parameters())
    for name, parameter in blocks.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.look(name))
    for _ in range(2):
        out = torch.randn(2, 16, _WIDTH).to(device).requires_grad_(reentrant)
        for block in blocks:
            out = checkpoint(block, out, use_reentrant=reentrant)
        out.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return log.alive


@pytest.mark.parametrize("reentrant", [False, True])
def test_tensors_live_as_long_as_on_the_cpu(reentrant):
    expected = liveness("cpu", reentrant)
    assert len(expected) == 2 * _BLOCKS * 12 and any(alive for _, alive in expected)
    with CudaEmulation(load_profile("a100_40gb"), options=AllocatorOptions()):
        assert liveness("cuda", reentrant) == expected
