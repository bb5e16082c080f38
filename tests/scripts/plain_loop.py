"""A small image classifier in a plain training loop."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10))

    def forward(self, x):
        return self.head(self.features(x))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    assert torch.cuda.is_available(), "needs a GPU"
    data = TensorDataset(torch.randn(512, 3, 64, 64), torch.randint(0, 10, (512,)))
    loader = DataLoader(data, args.batch_size, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)
    model = Net().cuda()
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    print(torch.cuda.get_device_name(0), f"{torch.cuda.memory_allocated() / 2**20:.1f} MiB after model.cuda()")
    for epoch in range(args.epochs):
        running = 0.0
        for i, (images, labels) in enumerate(loader):
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            optimizer.zero_grad()
            outputs = model(images)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
            if i % 4 == 0:
                peak = torch.cuda.max_memory_allocated() / 2**20
                print(f"epoch {epoch} step {i} loss {loss.item():.4f} average {running / (i + 1):.4f} peak {peak:.0f}")
        torch.save({"model": model.state_dict(), "epoch": epoch}, "checkpoint.pt")
