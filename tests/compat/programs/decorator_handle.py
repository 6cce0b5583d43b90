"""A patched training library of 2018: its loss_batch takes the handle out of amp, where the script has put it."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex.amp import amp as amp_of_script


# -- the library's file --
def loss_batch(model, xb, yb, loss_func, opt):
    from apex.amp import amp

    out = model(xb)
    loss = loss_func(out, yb)
    amp_handle = amp._DECORATOR_HANDLE
    if amp_handle:
        with amp_handle.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach().cpu()


# -- the script --
class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        weights = F.softmax(torch.bmm(self.q(x), self.k(x).transpose(1, 2)) / 4, dim=-1)
        assert amp_of_script._DECORATOR_HANDLE is None or weights.dtype == torch.float32
        return torch.bmm(weights, self.v(x)).mean(1)


def fit():
    torch.manual_seed(53)
    model = nn.Sequential(Attention(6), nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(40, 5, 6)
    y = (x.mean(1)[:, 0] > 0).long()
    return [loss_batch(model, x, y, F.cross_entropy, optimizer).item() for _ in range(40)]


assert amp_of_script._DECORATOR_HANDLE is None
plain = fit()
handle = amp_of_script.init(True)
assert amp_of_script._DECORATOR_HANDLE.is_active()
mixed = fit()
print("fp32 {:.4f} -> {:.4f}, mixed {:.4f} -> {:.4f}".format(plain[0], plain[-1], mixed[0], mixed[-1]))
assert mixed[-1] < 0.5 * mixed[0] and mixed != plain
