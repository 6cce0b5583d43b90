"""DCGAN in the way of apex/examples: three losses, two optimizers, O1."""

import argparse

import torch
import torch.nn as nn

try:
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")

parser = argparse.ArgumentParser()
parser.add_argument("--niter", type=int, default=60)
parser.add_argument("--opt_level", default="O1", help="amp opt_level, default=O1")
opt = parser.parse_args()

torch.manual_seed(2809)
netG = nn.Sequential(nn.Linear(4, 32), nn.ReLU(True), nn.Linear(32, 2))
netD = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.01, betas=(0.5, 0.999))
[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
)

centre = torch.tensor([2.0, -1.0])
distances = []
for it in range(opt.niter):
    # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    real = centre + 0.1 * torch.randn(64, 2)
    output = netD(real)
    errD_real = criterion(output, torch.full_like(output, 1.0))
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    fake = netG(torch.randn(64, 4))
    output = netD(fake.detach())
    errD_fake = criterion(output, torch.full_like(output, 0.0))
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    optimizerD.step()

    # (2) Update G network: maximize log(D(G(z)))
    netG.zero_grad()
    output = netD(fake)
    errG = criterion(output, torch.full_like(output, 1.0))
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    distances.append((fake.detach().float().mean(0) - centre).norm().item())

assert sorted(amp.state_dict())[:3] == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
assert all(amp.state_dict()["loss_scaler%d" % i]["unskipped"] > 0 for i in range(3))
print("distance {:.3f} -> {:.3f}".format(distances[0], min(distances[-20:])))
assert min(distances[-20:]) < 0.5 * distances[0]
