"""A normalizing flow: couplings with log-determinants, a rotation with slogdet, distributions of torch."""

import numpy as np
import torch
from torch import distributions, nn


class RealNVP(nn.Module):
    def __init__(self, mask, prior):
        super().__init__()
        self.prior = prior
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.mix = nn.Parameter(torch.eye(2))
        self.t = nn.ModuleList(self.net() for _ in range(len(mask)))
        self.s = nn.ModuleList(nn.Sequential(self.net(), nn.Tanh()) for _ in range(len(mask)))

    @staticmethod
    def net():
        return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 2))

    def f(self, x):
        log_det_J, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.t))):
            z_ = self.mask[i] * z
            s = self.s[i](z_) * (1 - self.mask[i])
            t = self.t[i](z_) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
            log_det_J -= s.sum(dim=1)
        return z @ self.mix, log_det_J + torch.slogdet(self.mix)[1]

    def log_prob(self, x):
        z, logp = self.f(x)
        return self.prior.log_prob(z) + logp


torch.manual_seed(0)
np.random.seed(0)
masks = torch.from_numpy(np.array([[0, 1], [1, 0]] * 2).astype(np.float32))
prior = distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
flow = RealNVP(masks, prior)
optimizer = torch.optim.Adam([p for p in flow.parameters() if p.requires_grad], lr=5e-3)
angle = np.random.rand(512) * np.pi
points = np.stack([np.cos(angle), np.sin(angle)], 1) + np.random.randn(512, 2) * 0.1
points = points.astype(np.float32)
for t in range(80):
    loss = -flow.log_prob(torch.from_numpy(points)).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
z = flow.f(torch.from_numpy(points))[0].detach().numpy()
print("nll", loss.item())
print("spread", z.std())
