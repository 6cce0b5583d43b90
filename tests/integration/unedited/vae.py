"""A variational autoencoder: reparametrization, a summed BCE and the divergence outside of the module."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc21 = nn.Linear(64, 6)
        self.fc22 = nn.Linear(64, 6)
        self.fc3 = nn.Linear(6, 64)
        self.fc4 = nn.Linear(64, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


torch.manual_seed(0)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(4):
    model.train()
    train_loss = 0
    for data in images[torch.randperm(1600)].split(64):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
with torch.no_grad():
    sample = model.decode(torch.randn(8, 6)).cpu()
    z = model.encode(images[1600:])[0].numpy()
print("average loss", train_loss / 1600)
print("sample", sample.view(8, 1, 8, 8).shape, sample.numpy().dtype)
print("codes", z.shape, z.dtype)
