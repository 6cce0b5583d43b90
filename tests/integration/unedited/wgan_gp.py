"""A critic with a gradient penalty, by torch.autograd.grad with create_graph."""

import torch
from torch import autograd, nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))


def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1).expand_as(real)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(interpolates)
    gradients = autograd.grad(
        outputs=scores,
        inputs=interpolates,
        grad_outputs=torch.ones(scores.size()),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * 10


for iteration in range(150):
    real, fake = torch.randn(128, 2) * 0.2 + 2.0, torch.randn(128, 2) * 0.2
    penalty = gradient_penalty(real, fake)
    cost = critic(fake).mean() - critic(real).mean() + penalty
    optimizer.zero_grad()
    cost.backward()
    optimizer.step()

print("distance", (critic(real).mean() - critic(fake).mean()).item())
print("penalty", bool(penalty < 2), penalty.dtype)
