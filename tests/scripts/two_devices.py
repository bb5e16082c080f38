"""Naive model parallelism: one process with half of the layers on each of two devices."""

import torch
from torch import nn

WIDTH, BATCH = 1024, 256
first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to("cuda:0")
second = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 10)).cuda(1)
assert torch.cuda.device_count() == 2 and next(second.parameters()).device == torch.device("cuda:1")
optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
for _ in range(4):
    optimizer.zero_grad()
    hidden = first(torch.randn(BATCH, WIDTH, device="cuda"))
    logits = second(hidden.to("cuda:1"))
    assert logits.get_device() == 1
    target = torch.randint(10, (BATCH,), device="cuda:1")
    nn.functional.cross_entropy(logits, target).backward()
    assert first[0].weight.grad.device.index == 0 and second[0].weight.grad.device.index == 1
    optimizer.step()
