"""Contrastive learning: the similarities are a matmul outside of the modules, keys go into a queue."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
centers = torch.randn(6, 16)
encoder = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
queue = F.normalize(torch.randn(16, 128), dim=0)
pointer, similarities = 0, torch.zeros(64, 64)

for step in range(60):
    labels = torch.randint(6, (32,))
    views = torch.cat([centers[labels] + 0.3 * torch.randn(32, 16) for _ in range(2)])
    features = F.normalize(encoder(views), dim=1)
    logits = torch.matmul(features, features.T)
    similarities[:] = logits.detach()
    logits = logits.masked_fill(torch.eye(64, dtype=torch.bool), -9e15)
    targets = (torch.arange(64) + 32) % 64
    negatives = torch.einsum("nc,ck->nk", [features, queue.clone().detach()])
    loss = F.cross_entropy(torch.cat([logits, negatives], dim=1) / 0.2, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        queue[:, pointer : pointer + 32] = features[:32].T
        pointer = (pointer + 32) % 128

encoder.eval()
with torch.no_grad():
    embedded = F.normalize(encoder(centers.repeat_interleave(20, 0) + 0.3 * torch.randn(120, 16)), dim=1)
    nearest = (embedded @ embedded.t()).fill_diagonal_(-1).argmax(1)
right = (nearest // 20 == torch.arange(120) // 20).float().mean()
print("nearest neighbour", right.item())
print("similarities", similarities.dtype, similarities.diagonal().mean().item())
print("rows", (features @ features.t()).detach().numpy().dtype)
