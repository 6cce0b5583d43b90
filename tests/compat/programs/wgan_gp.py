"""WGAN-GP under O1: the gradient penalty by autograd.grad of a scaled loss with create_graph=True."""

import torch
from apex import amp
from torch import nn


def gradient_penalty(critic, real, fake, optimizer):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = critic(mixed).float().sum()
    with amp.scale_loss(score, [], loss_id=1) as scaled_score:
        scaled_grad = torch.autograd.grad(scaled_score, mixed, create_graph=True)[0]
    scale = amp._amp_state.loss_scalers[1].loss_scale()
    grad = scaled_grad.float() / scale
    return ((grad.norm(2, dim=1) - 1) ** 2).mean(), grad


def main():
    torch.manual_seed(17)
    critic = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    critic, optimizer = amp.initialize(critic, optimizer, opt_level="O1", num_losses=2, loss_scale=256.0)
    gaps, penalties = [], []
    for step in range(80):
        real = torch.randn(64, 2) * 0.3 + 1.0
        fake = torch.randn(64, 2) * 0.3 - 1.0
        optimizer.zero_grad()
        gp, grad = gradient_penalty(critic, real, fake, optimizer)
        assert grad.requires_grad
        gap = critic(fake).float().mean() - critic(real).float().mean()
        loss = gap + 10 * gp
        with amp.scale_loss(loss, optimizer, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        gaps.append(gap.item())
        penalties.append(gp.item())
    print("gap {:.3f} -> {:.3f}, penalty {:.3f} -> {:.3f}".format(gaps[0], gaps[-1], penalties[0], penalties[-1]))
    assert gaps[-1] < gaps[0] - 1 and penalties[-1] < 0.5 * penalties[0]


if __name__ == "__main__":
    main()
