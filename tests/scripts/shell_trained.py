"""A network whose size the command line decides, for shell scripts."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
parser.add_argument("--layers", type=int)
parser.add_argument("--out")
parser.add_argument("--batch", type=int, default=8)
options = parser.parse_args()
assert options.out == "results of scripts"
network = torch.nn.Sequential(*(torch.nn.Linear(options.width, options.width) for _ in range(options.layers))).cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    network(torch.randn(options.batch, options.width, device="cuda")).sum().backward()
    optimizer.step()
