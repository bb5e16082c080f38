"""Epochs with a validation that collects all logits on the device; `--steps` counts steps instead of epochs."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4096)).cuda()
optimizer = torch.optim.Adam(network.parameters())
train = DataLoader(TensorDataset(torch.randn(2560, 64)), batch_size=32)
validation = DataLoader(TensorDataset(torch.randn(15000, 64)), batch_size=100)


def evaluate():
    network.eval()
    logits = []
    with torch.inference_mode():
        for (batch,) in validation:
            logits.append(network(batch.cuda()))
    network.train()
    return torch.cat(logits).argmax(-1).float().mean().item()


global_step = 0
for _ in range(3):
    for (batch,) in train:
        optimizer.zero_grad()
        network(batch.cuda()).square().mean().backward()
        optimizer.step()
        global_step += 1
        if "--steps" in sys.argv and global_step % 100 == 0:
            evaluate()
    if "--steps" not in sys.argv:
        evaluate()
torch.save(network.state_dict(), "final.pt")
