"""Layers of bitsandbytes in int8 under a head that is trained."""

import bitsandbytes
import torch
from torch import nn

WIDTH = 1024
layers = [bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False) for _ in range(4)]
network = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 10)).half().cuda()
assert layers[0].weight.dtype == torch.int8, layers[0].weight.dtype
print(f"loaded {torch.cuda.memory_allocated()} bytes")
optimizer = torch.optim.SGD([item for item in network.parameters() if item.requires_grad], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    network(torch.randn(256, WIDTH, device="cuda", dtype=torch.half)).sum().backward()
    assert network[0].weight.grad.shape == (WIDTH, WIDTH), "gradients pass the layers in int8"
    optimizer.step()
