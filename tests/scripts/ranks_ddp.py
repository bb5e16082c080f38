"""DistributedDataParallel under torchrun."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
blocks = [nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(*blocks, nn.Linear(1024, 16, bias=False)).to(rank)
model = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=100))  # as torchtitan does: it asks for NCCL's class
for _ in range(4):
    x, y = torch.randn(4, 1024).cuda(), torch.randint(16, (4,)).cuda()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, loss {loss.item()}")
dist.destroy_process_group()
