"""A loop of accelerate that takes its precision and its number of processes from `accelerate launch`."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

accelerator = Accelerator()
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
loader = DataLoader(TensorDataset(torch.randn(512, 1024)), batch_size=32)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.print(accelerator.state)
for (x,) in loader:
    with accelerator.accumulate(model):
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
