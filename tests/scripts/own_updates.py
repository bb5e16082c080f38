"""A loop without an optimizer of torch, which fails when it is over."""

import torch
from torch import nn

network = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
for _ in range(200):
    network(torch.randn(64, 512, device="cuda")).sum().backward()
    for parameter in network.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None
raise RuntimeError("after the loop")
