"""A regression whose metrics are numpy's, also in the middle of training."""

import numpy as np
import torch
from sklearn.datasets import load_diabetes

np.random.seed(0)
torch.manual_seed(0)
X, y = load_diabetes(return_X_y=True)
X = ((X - X.mean(0)) / X.std(0)).astype(np.float32)
y = ((y - y.mean()) / y.std()).astype(np.float32)
order = np.random.permutation(len(X))
train, test = order[:350], order[350:]

model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
history = []
for epoch in range(60):
    output = model(torch.from_numpy(X[train]))
    loss = ((output.squeeze() - torch.from_numpy(y[train])) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    residuals = output.detach().cpu().numpy().ravel() - y[train]
    history.append(np.sqrt(np.mean(residuals**2)))

with torch.no_grad():
    predicted = np.asarray(model(torch.from_numpy(X[test]))).ravel()
r2 = 1 - ((y[test] - predicted) ** 2).sum() / ((y[test] - y[test].mean()) ** 2).sum()
print("train rmse", history[-1])
print("r2", r2)
print("correlation", np.corrcoef(predicted, y[test])[0, 1])
print("dtype", predicted.dtype, np.asarray(history).dtype)
