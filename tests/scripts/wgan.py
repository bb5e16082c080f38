"""A WGAN whose generator steps in every fifth iteration."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 3072)).cuda()
critic = nn.Sequential(nn.Linear(3072, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)).cuda()
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4)
of_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
loader = DataLoader(TensorDataset(torch.randn(960, 3072)), batch_size=32)
for _ in range(2):
    for i, (real,) in enumerate(loader):
        fake = generator(torch.randn(32, 64, device="cuda")).detach()
        of_critic.zero_grad()
        (critic(fake).mean() - critic(real.cuda()).mean()).backward()
        of_critic.step()
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.01, 0.01)
        if (i + 1) % 5 == 0:
            of_generator.zero_grad()
            (-critic(generator(torch.randn(32, 64, device="cuda"))).mean()).backward()
            of_generator.step()
