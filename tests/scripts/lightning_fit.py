"""A LightningModule with a metric, logging, validation, a schedule and a checkpoint."""

import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_loop import Net
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class LitNet(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.accuracy = Net(), MulticlassAccuracy(10)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        out = self.net(x)
        self.accuracy(out, y)
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(out, y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)}


data = TensorDataset(torch.randn(256, 3, 64, 64), torch.randint(0, 10, (256,)))
train, validation = DataLoader(data, 64, shuffle=True, pin_memory=True), DataLoader(data, 64)
trainer = L.Trainer(
    accelerator="gpu", devices=1, precision=sys.argv[1] if len(sys.argv) > 1 else "32-true", max_epochs=2,
    log_every_n_steps=1, enable_progress_bar=False, logger=False, default_root_dir="lit",
    callbacks=[ModelCheckpoint(dirpath="lit", monitor="val_loss", save_last=True)],
)  # fmt: skip
model = LitNet()
trainer.fit(model, train, validation)
print("done", {name: float(value) for name, value in trainer.callback_metrics.items()})
