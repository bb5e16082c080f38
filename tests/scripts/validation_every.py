"""A loop that validates with a larger batch every 50 steps, on the device."""

import torch
from torch import nn

network = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
).cuda()  # fmt: skip
optimizer = torch.optim.Adam(network.parameters())


def validate():
    network.eval()
    with torch.no_grad():
        for _ in range(2):
            network(torch.randn(1024, 3, 32, 32, device="cuda"))
    network.train()


for step in range(400):
    loss = network(torch.randn(32, 3, 32, 32, device="cuda")).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        validate()
