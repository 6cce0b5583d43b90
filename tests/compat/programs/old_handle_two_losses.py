"""Amp of 2018 with a wrapped optimizer: two losses, each with a scale of its own."""

import torch
from torch import nn
from apex import amp

amp_handle = amp.init()


class TwoHeads(nn.Module):
    def __init__(self):
        super(TwoHeads, self).__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.Tanh())
        self.label = nn.Linear(32, 3)
        self.value = nn.Linear(32, 1)

    def forward(self, x):
        x = self.trunk(x)
        return self.label(x), self.value(x)


def train():
    torch.manual_seed(2)
    x = torch.randn(48, 10)
    y, v = x[:, :3].argmax(1), x[:, 3:4]
    net = TwoHeads()
    optimizer = amp_handle.wrap_optimizer(torch.optim.Adam(net.parameters(), lr=0.02), num_loss=2)
    try:
        with amp_handle.scale_loss(torch.zeros(1), optimizer):
            pass
        raise SystemExit("handle.scale_loss took a wrapped optimizer")
    except RuntimeError as e:
        assert "optimizer.scale_loss" in str(e)
    totals = []
    for _ in range(30):
        optimizer.zero_grad()
        logits, value = net(x)
        loss1 = nn.functional.cross_entropy(logits, y)
        loss2 = nn.functional.mse_loss(value, v)
        with optimizer.scale_loss(loss1) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with optimizer.scale_loss(loss2) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        totals.append(loss1.item() + loss2.item())
    state = optimizer.state_dict()
    assert len(state["param_groups"]) == len(optimizer.param_groups) == 1
    optimizer.load_state_dict(state)
    print("losses {:.4f} -> {:.4f}".format(totals[0], totals[-1]))
    assert totals[-1] < 0.4 * totals[0]


train()
