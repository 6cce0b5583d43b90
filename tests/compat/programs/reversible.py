"""A reversible block that recomputes in its backward, with casts decided by decorators on the Function."""

import torch
import torch.nn as nn
from apex import amp


class ReversibleFunction(torch.autograd.Function):
    @staticmethod
    @amp.float_function
    def forward(ctx, x, f, g, *params):
        assert x.dtype == torch.float32
        x1, x2 = x.chunk(2, dim=1)
        with torch.no_grad():
            y1 = x1 + f(x2).float()
            y2 = x2 + g(y1).float()
        ctx.f, ctx.g = f, g
        ctx.save_for_backward(y1.detach(), y2.detach())
        return torch.cat([y1, y2], dim=1)

    @staticmethod
    def backward(ctx, dy):
        y1, y2 = ctx.saved_tensors
        dy1, dy2 = dy.chunk(2, dim=1)
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            gy1 = ctx.g(y1).float()
            x2 = (y2 - gy1).detach().requires_grad_()
            grads_g = torch.autograd.grad(gy1, (y1, *ctx.g.parameters()), dy2)
            dy1 = dy1 + grads_g[0]
            fx2 = ctx.f(x2).float()
            grads_f = torch.autograd.grad(fx2, (x2, *ctx.f.parameters()), dy1)
        return (torch.cat([dy1, dy2 + grads_f[0]], 1), None, None, *grads_f[1:], *grads_g[1:])


class ReversibleBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.g = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        return ReversibleFunction.apply(x, self.f, self.g, *self.f.parameters(), *self.g.parameters())


def main():
    torch.manual_seed(19)
    model = nn.Sequential(ReversibleBlock(6), ReversibleBlock(6), nn.Linear(12, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    x = torch.randn(64, 12)
    y = (x[:, :1] * x[:, 6:7]).tanh()
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    print("loss {:.4f} -> {:.4f}".format(losses[0], losses[-1]))
    assert losses[-1] < 0.5 * losses[0]


main()
