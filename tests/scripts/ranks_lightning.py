"""Lightning's Trainer on four devices; the strategy is the argument: ddp or fsdp."""

import sys

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024, bias=False)

    def forward(self, x):
        return self.linear(x).relu()


class Subject(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(1024, 16, bias=False))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


rows = TensorDataset(torch.randn(64, 1024), torch.randint(16, (64,)))
strategy = FSDPStrategy(auto_wrap_policy={Block}) if sys.argv[1] == "fsdp" else sys.argv[1]
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(accelerator="gpu", devices=4, strategy=strategy, max_steps=4, **quiet)
trainer.fit(Subject(), DataLoader(rows, batch_size=4))
