"""A mixture of experts with one expert on each rank: tokens are exchanged by all-to-all."""

import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
r, n = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


class A2A(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx, g):
        y = torch.empty_like(g)
        dist.all_to_all_single(y, g.contiguous())
        return y


router = nn.Linear(512, n).cuda()
expert = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
o = torch.optim.AdamW([*router.parameters(), *expert.parameters()])
for _ in range(3):
    o.zero_grad()
    x = torch.randn(256, 512, device="cuda")
    p = router(x).softmax(-1)
    c = 256 // n
    idx = p.topk(c, dim=0).indices.t().reshape(-1)
    h = A2A.apply(x[idx])
    h = A2A.apply(expert(h))
    out = torch.zeros_like(x).index_add(0, idx, h * p[idx].max(-1, keepdim=True).values)
    out.sum().backward()
    for q in router.parameters():
        dist.all_reduce(q.grad)
    o.step()
