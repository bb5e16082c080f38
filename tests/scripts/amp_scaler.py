"""Mixed precision in fp16 with a gradient scaler, clipping, a schedule and a validation pass."""

import argparse

import torch
from plain_loop import Net
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--legacy", action="store_true")
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(300, 3, 64, 64), torch.randint(0, 10, (300,)))
train, val = random_split(data, [200, 100], generator=torch.Generator().manual_seed(0))
train_loader, val_loader = DataLoader(train, 64, shuffle=True, pin_memory=True), DataLoader(val, 64)
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=2 * len(train_loader))
scaler = torch.cuda.amp.GradScaler() if args.legacy else torch.amp.GradScaler("cuda")
best = -1.0
for epoch in range(2):
    model.train()
    for x, y in train_loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.amp.autocast() if args.legacy else torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
            loss = F.cross_entropy(out, y, label_smoothing=0.1)
        assert out.dtype == torch.float16, out.dtype
        if not torch.isfinite(loss):
            raise SystemExit("the loss is not finite")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in val_loader:
            x, y = x.to(device), y.to(device)
            probabilities = model(x).softmax(-1)
            correct += (probabilities.argmax(1) == y).sum().item()
            total += y.size(0)
            assert probabilities.cpu().numpy().shape == (y.size(0), 10)
    assert total == 100 and scaler.get_scale() == 65536.0, scaler.get_scale()
    print(f"epoch {epoch}: accuracy {correct / total:.3f} norm {norm.item():.3f} scale {scaler.get_scale()}")
    if correct / total > best:
        best = correct / total
        torch.save(model.state_dict(), "best.pt")
