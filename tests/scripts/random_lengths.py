"""A small sequence classifier on batches whose length is drawn anew for each step."""

import random

import torch
from torch import nn
from torch.nn import functional as F

random.seed(0)
model = nn.Sequential(nn.Embedding(2000, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 20)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2000):
    longest = max(int(random.lognormvariate(5, 0.5)) for _ in range(16))
    tokens = torch.randint(2000, (16, min(longest, 1024))).cuda()
    loss = F.cross_entropy(model(tokens).mean(1), torch.randint(20, (16,)).cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
