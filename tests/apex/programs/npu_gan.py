"""A GAN as it was moved to NPUs: fused optimizers, two calls of initialize with combine_grad, and the window of each
loss scaler set afterwards."""

import apex
import torch
import torch.nn as nn
from apex import amp


def main():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer_G = apex.optimizers.NpuFusedAdam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_D = apex.optimizers.NpuFusedAdam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    generator, optimizer_G = amp.initialize(generator, optimizer_G, opt_level="O1", combine_grad=True)
    discriminator, optimizer_D = amp.initialize(discriminator, optimizer_D, opt_level="O1", combine_grad=True)
    for scaler in amp._amp_state.loss_scalers:
        scaler._scale_seq_len = 50
        assert scaler._scale_seq_len == 50

    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    distances = []
    for _ in range(150):
        real = torch.randn(64, 2) * 0.3 + 2.0
        optimizer_G.zero_grad()
        fake = generator(torch.randn(64, 4))
        with amp.scale_loss(criterion(discriminator(fake), ones), optimizer_G) as scaled_loss:
            scaled_loss.backward()
        optimizer_G.step()

        optimizer_D.zero_grad()
        loss = (criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)) / 2
        with amp.scale_loss(loss, optimizer_D) as scaled_loss:
            scaled_loss.backward()
        optimizer_D.step()
        distances.append((fake.detach().float().mean(0) - 2.0).norm().item())
    print(f"distance {distances[0]:.3f} -> {distances[-1]:.3f}")
    assert distances[-1] < distances[0]


if __name__ == "__main__":
    main()
