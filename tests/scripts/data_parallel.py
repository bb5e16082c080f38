"""DataParallel over all visible devices: replicas are made anew for each batch, gradients are summed on the first."""

import torch
from torch import nn

WIDTH, BATCH = 1024, 512
network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda()
if torch.cuda.device_count() > 1:
    network = nn.DataParallel(network)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    output = network(torch.randn(BATCH, WIDTH).cuda())
    assert output.device.index == 0 and len(output) == BATCH
    output.pow(2).mean().backward()
    optimizer.step()
