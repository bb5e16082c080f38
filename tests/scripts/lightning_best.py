"""A LightningModule that is tested with the checkpoint of its best epoch, in inference mode."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

    def _loss(self, batch, name):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log(name, loss)
        return loss

    def training_step(self, batch, _):
        return self._loss(batch, "train_loss")

    def validation_step(self, batch, _):
        self._loss(batch, "val_loss")

    def test_step(self, batch, _):
        self._loss(batch, "test_loss")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def loader(count, size):
    return DataLoader(TensorDataset(torch.randn(count, 256), torch.randint(10, (count,))), batch_size=size)


best = ModelCheckpoint(monitor="val_loss", mode="min")
trainer = L.Trainer(max_epochs=2, accelerator="gpu", devices=1, callbacks=[best], logger=False)
trainer.fit(Net(), loader(640, 32), loader(128, 64))
print(trainer.test(dataloaders=loader(512, 256), ckpt_path="best"), best.best_model_path)
