"""A mixture of experts whose router chooses tokens by index: shapes depend on data."""

import torch
from torch import nn
from torch.nn import functional as F

tokens, size, experts, top = 4096, 256, 8, 2


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(size, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)) for _ in range(experts)
        )

    def forward(self, x):
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=-1), top, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == index)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


model = MoE().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    x = torch.randn(tokens, size, device="cuda")
    loss = F.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
