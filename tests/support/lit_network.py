"""A LightningModule, as a user writes it: `lit_network.py:Classifier` is a target of the tests."""

import lightning
import torch
from torch import nn
from torch.nn import functional as F


class Classifier(lightning.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 3))
        self.example_input_array = torch.zeros(2, 10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        weights = torch.ones(3, device=self.device)
        loss = F.cross_entropy(self.net(x), y, weights)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), amsgrad=True)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
