"""A GAN on points of a Gaussian: two networks, two optimizers, labels that are refilled."""

import torch
import torch.nn as nn

torch.manual_seed(0)
real_label, fake_label, latent = 1.0, 0.0, 8
netG = nn.Sequential(nn.Linear(latent, 32), nn.BatchNorm1d(32), nn.ReLU(True), nn.Linear(32, 2))
netD = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=4e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
fixed_noise = torch.randn(512, latent)
G_losses, D_losses = [], []

for i in range(250):
    netD.zero_grad()
    real = torch.randn(64, 2) * 0.3 + torch.tensor([1.0, -1.0])
    label = torch.full((64,), real_label)
    errD_real = criterion(netD(real).view(-1), label)
    errD_real.backward()
    fake = netG(torch.randn(64, latent))
    label.fill_(fake_label)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(real_label)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    G_losses.append(errG.item())
    D_losses.append((errD_real + errD_fake).item())

with torch.no_grad():
    points = netG(fixed_noise).detach().cpu()
distance = (points.mean(0) - torch.tensor([1.0, -1.0])).norm()
print("near", bool(distance < 0.6))
print("losses", bool(torch.tensor(G_losses + D_losses).isfinite().all()), points.dtype)
