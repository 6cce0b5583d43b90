"""Two layers by hand: no modules, no optimizer, weights that are updated in place, an EMA of them."""

import numpy as np
import torch
from sklearn.datasets import make_moons

torch.manual_seed(0)
X, y = make_moons(300, noise=0.1, random_state=0)
x = torch.from_numpy(X.astype(np.float32))
t = torch.from_numpy(y.astype(np.float32)).unsqueeze(1)
w1 = (torch.randn(2, 32) * 0.7).requires_grad_()
b1 = torch.zeros(32, requires_grad=True)
w2 = (torch.randn(32, 1) * 0.3).requires_grad_()
b2 = torch.zeros(1, requires_grad=True)
hidden_states = torch.zeros(300, 32)
average = w1.detach().clone()

for step in range(250):
    hidden = (x @ w1 + b1).tanh()
    logits = hidden.mm(w2) + b2
    hidden_states[:] = hidden.detach()
    probability = 1 / (1 + torch.exp(-logits))
    loss = -(t * torch.log(probability + 1e-7) + (1 - t) * torch.log(1 - probability + 1e-7)).mean()
    loss.backward()
    with torch.no_grad():
        for p in (w1, b1, w2, b2):
            p -= 0.8 * p.grad
            p.grad.zero_()
        average.mul_(0.9).add_(w1, alpha=0.1)

print("loss", loss.item())
print("accuracy", ((probability > 0.5).float() == t).float().mean().item())
print("logits", logits.detach().numpy().dtype, hidden.dtype, hidden_states.dtype)
print("average", bool((average - w1).abs().max() < 0.2))
print("norm", np.linalg.norm((x @ w1).detach().numpy()) / 100)
