"""Mean teacher: model and EMA go to initialize as a list, at O2, and the EMA follows by hand."""

import copy

import torch
from torch import nn

try:
    import apex
    from apex import amp
except ImportError:
    print("Cannot import NVIDIA Apex...")
    raise


def update_ema(model, ema, alpha):
    for p, e in zip(model.parameters(), ema.parameters()):
        e.data.mul_(alpha).add_(p.data, alpha=1 - alpha)
    for b, e in zip(model.buffers(), ema.buffers()):
        e.data.copy_(b.data)


torch.manual_seed(23)
m = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
e = copy.deepcopy(m)
for p in e.parameters():
    p.requires_grad_(False)
opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True)
(model, ema), opt = amp.initialize([m, e], opt, opt_level="O2", verbosity=0)
assert model is m and ema is e

x = torch.randn(90, 8)
y = x[:, :3].argmax(1)
losses = []
for step in range(60):
    logits = model(x)
    with torch.no_grad():
        teacher = ema(x)
    assert logits.dtype == teacher.dtype == torch.float32
    loss = nn.functional.cross_entropy(logits, y) + 0.1 * nn.functional.mse_loss(logits.softmax(1), teacher.softmax(1))
    opt.zero_grad()
    with amp.scale_loss(loss, opt) as scaled_loss:
        scaled_loss.backward()
    opt.step()
    update_ema(model, ema, 0.9)
    losses.append(loss.item())
ema.eval()
accuracy = (ema(x).argmax(1) == y).float().mean().item()
print("loss {:.4f} -> {:.4f}, accuracy of the teacher {:.3f}".format(losses[0], losses[-1], accuracy))
assert losses[-1] < 0.5 * losses[0] and accuracy > 0.9
