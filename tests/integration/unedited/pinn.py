"""A differential equation u'' = -u by second derivatives of a network, with Adam and then L-BFGS."""

import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(1, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
t = torch.linspace(0, 1.5, 40).view(-1, 1).requires_grad_(True)
zero = torch.zeros(1, 1, requires_grad=True)


def residual():
    u = net(t)
    du = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
    ddu = torch.autograd.grad(du, t, torch.ones_like(du), create_graph=True)[0]
    start = net(zero)
    speed = torch.autograd.grad(start, zero, torch.ones_like(start), create_graph=True)[0]
    return ((ddu + u) ** 2).mean() + (start**2).mean() + ((speed - 1) ** 2).mean()


adam = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(150):
    adam.zero_grad()
    loss = residual()
    loss.backward()
    adam.step()
lbfgs = torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=10)


def closure():
    lbfgs.zero_grad()
    loss = residual()
    loss.backward()
    return loss


lbfgs.step(closure)
with torch.no_grad():
    error = (net(t) - torch.sin(t)).abs().max()
print("near", bool(error < 0.2))
print("dtype", error.dtype)
