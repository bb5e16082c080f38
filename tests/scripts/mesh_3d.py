"""Two replicas of two shards of two tensor-parallel halves: a mesh of three dimensions."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("rep", "shard", "tp"))
m = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
parallelize_module(m, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(m, mesh=mesh["rep", "shard"])
o = torch.optim.AdamW(m.parameters())
for _ in range(3):
    o.zero_grad()
    m(torch.randn(64, 1024, device="cuda")).sum().backward()
    o.step()
