"""Detection code: ops and classes registered before initialize, an extension's nms in float, custom Functions."""

import types

import torch
from apex import amp
from torch import nn


def _nms(boxes, scores, threshold):
    # Stands for a compiled extension that knows fp32 alone.
    if boxes.dtype != torch.float32 or scores.dtype != torch.float32:
        raise RuntimeError('"nms" not implemented for ' + str(boxes.dtype))
    return scores.argsort(descending=True)[:2]


_C = types.SimpleNamespace(nms=_nms)
nms = amp.float_function(_C.nms)

amp.register_half_function(torch.nn, "MaxPool2d")
amp.register_float_function(torch, "sigmoid")
amp.register_half_function(torch, "einsum")
amp.register_promote_function(torch, "atan2")
try:
    amp.register_float_function(torch, "no_such_function")
    raise SystemExit("a name that is not there was registered")
except ValueError:
    pass


class _ROIAlign(torch.autograd.Function):
    @staticmethod
    @amp.float_function
    def forward(ctx, input, scale):
        assert input.dtype == torch.float32
        ctx.scale = scale
        return input * scale

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.scale, None


class ROIAlign(nn.Module):
    @amp.float_function
    def forward(self, input):
        return _ROIAlign.apply(input, 0.5)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.align = ROIAlign()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.pool(self.body(x))
        assert x.dtype == seen
        x = self.align(x)
        assert x.dtype == torch.float32
        x = torch.einsum("nchw->nc", x) / 16
        assert x.dtype == torch.float32
        return torch.sigmoid(self.head(x))


torch.manual_seed(29)
model = Detector()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
seen = torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
assert seen != torch.float32
# After initialize as well, where Apex took no notice.
amp.register_float_function(torch, "cos")
assert torch.cos(torch.ones(2, dtype=seen)).dtype == torch.float32

y = torch.randint(0, 2, (32, 1)).float()
x = torch.randn(32, 1, 8, 8) * 0.3 + y.view(-1, 1, 1, 1)
losses = []
for _ in range(60):
    out = model(x)
    assert out.dtype == torch.float32
    loss = ((out - y) ** 2).mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    losses.append(loss.item())
half_boxes = torch.mm(torch.rand(5, 5), torch.rand(5, 4))
assert half_boxes.dtype == seen
keep = nms(half_boxes, torch.tensor([0.1, 0.9, 0.5, 0.2, 0.3], dtype=seen), 0.5)
assert keep.tolist() == [1, 2]
print("loss {:.4f} -> {:.4f}".format(losses[0], losses[-1]))
assert losses[-1] < 0.5 * losses[0]
