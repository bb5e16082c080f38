"""mmengine's Runner: a training loop of epochs with validation by a metric of the script's own."""

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Network(BaseModel):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 10))

    def forward(self, x, y, mode):
        out = self.body(x)
        return {"loss": F.cross_entropy(out, y)} if mode == "loss" else (out, y)


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        scores, labels = data_samples
        self.results.append({"size": len(labels), "correct": (scores.argmax(1) == labels).sum().cpu()})

    def compute_metrics(self, results):
        return {"accuracy": float(sum(item["correct"] for item in results)) / sum(item["size"] for item in results)}


data = TensorDataset(torch.randn(2048, 64), torch.randint(0, 10, (2048,)))
runner = Runner(
    model=Network(), work_dir="work", train_dataloader=DataLoader(data, 32, shuffle=True),
    train_cfg={"by_epoch": True, "max_epochs": 3, "val_interval": 1},
    optim_wrapper={"optimizer": {"type": "Adam", "lr": 1e-3}},
    val_dataloader=DataLoader(data, 1024), val_cfg={}, val_evaluator={"type": Accuracy},
)  # fmt: skip
runner.train()
