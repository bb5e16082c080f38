"""Graphs of random sizes in a batch object of the script's own, like that of PyTorch Geometric."""

import random
import sys

import torch
from torch import nn

random.seed(0)
steps = int(sys.argv[1])


class Graphs:
    """Several graphs as one, whose nodes and edges differ from batch to batch."""

    def __init__(self, nodes):
        edges = 8 * nodes
        self.x, self.edge_index = torch.randn(nodes, 64), torch.randint(nodes, (2, edges))
        self.batch, self.y = torch.randint(4, (nodes,)), torch.randn(4, 1)

    def to(self, device):
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        return self


class Convolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 128)

    def forward(self, x, edges):
        sent = self.linear(x)[edges[0]]
        return torch.zeros(len(x), 128, device=x.device).index_add(0, edges[1], sent).relu()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = Convolution(64), Convolution(128), nn.Linear(128, 1)

    def forward(self, data):
        x = self.second(self.first(data.x, data.edge_index), data.edge_index)
        return self.out(torch.zeros(4, 128, device=x.device).index_add(0, data.batch, x))


network = Network().cuda()
optimizer = torch.optim.Adam(network.parameters())
for _ in range(steps):
    data = Graphs(int(random.lognormvariate(6, 0.6))).to("cuda")
    loss = nn.functional.mse_loss(network(data), data.y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
