"""FSDP2 or FSDP1 (--flat) under torchrun."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024, bias=False)

    def forward(self, x):
        return self.linear(x).relu()


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(1024, 16, bias=False))
if "--flat" in sys.argv:
    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.cuda.current_device())
else:
    for module in [*model][:-1]:
        fully_shard(module)  # as accelerate: on the host, without a mesh
    fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    x, y = torch.randn(4, 1024).cuda(), torch.randint(16, (4,)).cuda()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
