"""Matrix factorization: embeddings, products summed by hand, RMSE and ranking in numpy."""

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(0)
torch.manual_seed(0)
users, items, k = 40, 60, 4
truth = rng.normal(size=(users, k)) @ rng.normal(size=(k, items)) / 2
pairs = np.argwhere(rng.random((users, items)) < 0.6)
ratings = truth[tuple(pairs.T)].astype(np.float32)


class MatrixFactorization(nn.Module):
    def __init__(self, n_users, n_items, n_factors):
        super().__init__()
        self.user_factors = nn.Embedding(n_users, n_factors)
        self.item_factors = nn.Embedding(n_items, n_factors)
        self.item_bias = nn.Embedding(n_items, 1)

    def forward(self, user, item):
        product = (self.user_factors(user) * self.item_factors(item)).sum(1)
        return product + self.item_bias(item).squeeze()


model = MatrixFactorization(users, items, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2, weight_decay=1e-4)
index = torch.from_numpy(pairs)
y = torch.as_tensor(ratings)
for epoch in range(80):
    optimizer.zero_grad()
    loss = nn.MSELoss()(model(index[:, 0], index[:, 1]), y)
    loss.backward()
    optimizer.step()
with torch.no_grad():
    table = model.user_factors.weight @ model.item_factors.weight.T + model.item_bias.weight.T
    scores = np.full((users, items), np.nan, dtype=np.float32)
    scores[pairs[:, 0], pairs[:, 1]] = model(index[:, 0], index[:, 1])
print("rmse", float(np.sqrt(np.nanmean((scores - truth) ** 2))))
print("top", (table.numpy().argmax(1) == truth.argmax(1)).mean(), table.dtype)
