"""Amp of 2018: one handle, from the top of the script to its end."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 4 * 4, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.bn(self.conv2(x)))
        return F.log_softmax(self.fc(x.view(x.size(0), -1)), dim=1)


def main():
    torch.manual_seed(1)
    amp_handle = amp.init(enabled=True, loss_scale="dynamic", enable_caching=True, verbose=False)
    assert amp_handle.is_active() and amp_handle.has_cache and not amp_handle.verbose

    target = torch.randint(0, 4, (64,))
    data = torch.randn(64, 1, 8, 8) + target.float().view(-1, 1, 1, 1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []
    for epoch in range(15):
        optimizer.zero_grad()
        output = model(data)
        assert output.dtype == torch.float32
        loss = F.nll_loss(output, target)
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        history.append(loss.item())
    assert model.conv1.weight.dtype == torch.float32
    with amp_handle._disable_casts():
        assert model.conv1(data).dtype == torch.float32
    assert model.conv1(data).dtype != torch.float32
    amp_handle._clear_cache()
    for param in model.parameters():
        amp_handle.remove_cache(param)
    amp_handle._deactivate()
    assert not amp_handle.is_active()
    assert model.conv1(data).dtype == torch.float32
    print("loss {:.4f} -> {:.4f}".format(history[0], history[-1]))
    assert history[-1] < 0.5 * history[0]


if __name__ == "__main__":
    main()
