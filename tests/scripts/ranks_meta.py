"""FSDP2 whose parameters are made on meta, and drawn on the device."""

import os

import torch
import torch.distributed as dist
import torch.distributed.optim
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def block():
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.LayerNorm(512))


with torch.device("meta"):
    network = nn.Sequential(*(block() for _ in range(4)))
for part in network:
    fully_shard(part)
fully_shard(network)
network.to_empty(device="cuda")
for module in network.modules():
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()
optimizer = torch.optim.AdamW(network.parameters())
for _ in range(4):
    network(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
