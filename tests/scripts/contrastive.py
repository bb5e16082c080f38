"""Contrastive learning with two towers, as in CLIP, with a learned temperature that is clamped."""

import torch
from torch import nn
from torch.nn import functional as F

batch = 64


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 64, 8, stride=8), nn.Flatten(), nn.Linear(64 * 64, 256))
        self.tokens = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.text, self.project = nn.TransformerEncoder(layer, 2), nn.Linear(128, 256)
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, images, tokens, mask):
        image = F.normalize(self.image(images), dim=-1)
        text = self.text(self.tokens(tokens), src_key_padding_mask=mask)[:, 0]
        return self.logit_scale.exp() * image @ F.normalize(self.project(text), dim=-1).t()


model = Towers().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    images, tokens = torch.randn(batch, 3, 64, 64).cuda(), torch.randint(1, 1000, (batch, 32)).cuda()
    lengths = torch.randint(8, 33, (batch, 1))
    mask = (torch.arange(32)[None] >= lengths).cuda()
    logits = model(images, tokens, mask)
    target = torch.arange(batch, device="cuda")
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6052)
    print(step, loss.item(), model.logit_scale.exp().item())
