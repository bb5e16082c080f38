"""A GAN with two networks and two optimizers."""

import torch
from torch import nn

latent, batch = 128, 64
generator = nn.Sequential(
    nn.ConvTranspose2d(latent, 256, 4), nn.BatchNorm2d(256), nn.ReLU(True),
    nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.ReLU(True),
    nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(True),
    nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
).cuda()  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(64, 128, 4, 2, 1), nn.BatchNorm2d(128),
    nn.LeakyReLU(0.2, True), nn.Conv2d(128, 256, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(256, 1, 4),
).cuda()  # fmt: skip
loss_of = nn.BCEWithLogitsLoss()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for step in range(8):
    real = torch.rand(batch, 3, 32, 32).cuda()
    ones, zeros = torch.ones(batch, device="cuda"), torch.zeros(batch, device="cuda")
    discriminator.zero_grad()
    fake = generator(torch.randn(batch, latent, 1, 1, device="cuda"))
    loss_d = loss_of(discriminator(real).view(-1), ones) + loss_of(discriminator(fake.detach()).view(-1), zeros)
    loss_d.backward()
    optimizer_d.step()
    generator.zero_grad()
    loss_g = loss_of(discriminator(fake).view(-1), ones)
    loss_g.backward()
    optimizer_g.step()
    print(step, loss_d.item(), loss_g.item())
