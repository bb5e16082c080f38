"""A small denoising diffusion model with an exponential moving average of its weights."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

steps = 1000
betas = torch.linspace(1e-4, 0.02, steps, device="cuda")
alphas_bar = torch.cumprod(1.0 - betas, dim=0)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(8, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(128, channels)

    def forward(self, x, t):
        return x + self.conv(F.silu(self.norm(x) + self.time(t)[:, :, None, None]))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(steps, 128)
        self.first, self.down = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 128, 3, stride=2, padding=1)
        self.high, self.low, self.last = Residual(64), Residual(128), Residual(64)
        self.up, self.out = nn.ConvTranspose2d(128, 64, 2, stride=2), nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x, t):
        t = self.embedding(t)
        x = self.high(self.first(x), t)
        return self.out(self.last(x + self.up(self.low(self.down(x), t)), t))


model = UNet().cuda()
ema = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(5):
    x = torch.rand(32, 3, 32, 32).cuda() * 2 - 1
    t = torch.randint(0, steps, (x.shape[0],), device=x.device)
    assert t.min().item() >= 0 and t.max().item() < steps
    noise = torch.randn_like(x)
    scale = alphas_bar[t].sqrt()[:, None, None, None]
    noisy = scale * x + (1 - alphas_bar[t]).sqrt()[:, None, None, None] * noise
    loss = F.mse_loss(model(noisy, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, current in zip(ema.parameters(), model.parameters()):
            average.lerp_(current, 1e-3)
    print(step, loss.item())
