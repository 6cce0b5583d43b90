"""A loss on probabilities that a sigmoid in half precision made: told once, in both dtypes, wherever they were cast."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def model() -> nn.Module:
    """Return a model whose logits are near 9, where a sigmoid in half is 1."""
    net = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())
    torch.nn.init.constant_(net[0].bias, 9.0)  # type: ignore[arg-type]
    return net


@pytest.fixture(params=["global", "modules"])
def handle(half: torch.dtype, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a handle of each scope."""
    made = autoamp.init(dtype=half, device_type="cpu", scope=request.param)
    yield made
    made.deactivate()


class WithLoss(nn.Module):
    """A module that computes the loss within."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(self.net(x), y)


TOLD: dict[str, Loss] = {
    "module": lambda net, x, y: nn.BCELoss()(net(x), y),
    "function": lambda net, x, y: F.binary_cross_entropy(net(x), y),
    "by name": lambda net, x, y: F.binary_cross_entropy(input=net(x), target=y),
    "weighted": lambda net, x, y: nn.BCELoss(weight=torch.ones(1))(net(x), y),
    "float": lambda net, x, y: nn.BCELoss()(net(x).float(), y),
    "squeezed": lambda net, x, y: nn.BCELoss()(net(x).squeeze(1), y.squeeze(1)),
    "viewed": lambda net, x, y: nn.BCELoss()(net(x).view(-1), y.flatten()),
    "clamped": lambda net, x, y: nn.BCELoss()(net(x).clamp(1e-7, 1 - 1e-7), y),
    "together": lambda net, x, y: nn.BCELoss()(torch.cat([net(x), net(x)]), torch.cat([y, y])),
    "within a module": lambda net, x, y: WithLoss(net)(x, y),
}
SILENT: dict[str, Loss] = {
    "logits": lambda net, x, y: nn.BCEWithLogitsLoss()(net[0](x), y),  # type: ignore[index]
    "an fp32 sigmoid": lambda net, x, y: nn.BCELoss()(net[0](x).float().sigmoid(), y),  # type: ignore[index]
    "softmax": lambda net, x, y: nn.BCELoss()(torch.softmax(net(x).float(), 1), y),
    "doubles": lambda net, x, y: nn.BCELoss()(net.double()(x.double()), y.double()),
    "data": lambda net, x, y: nn.BCELoss()(torch.sigmoid(x), torch.sigmoid(x)),
}


@pytest.mark.parametrize("way", TOLD)
def test_a_sigmoid_in_half_before_the_loss_is_told_once(handle: Any, half: torch.dtype, way: str) -> None:
    net, x, y = model(), torch.randn(4, 8), torch.zeros(4, 1)
    message = r"binary_cross_entropy is unsafe .*use binary_cross_entropy_with_logits"
    with pytest.warns(UserWarning, match=message) as told:
        losses = [TOLD[way](net, x, y) for _ in range(2)]
    assert len([one for one in told if "is unsafe" in str(one.message)]) == 1
    assert told[0].filename == __file__
    assert {loss.dtype for loss in losses} == {torch.float32}


@pytest.mark.parametrize("way", SILENT)
def test_other_losses_are_silent(handle: Any, way: str) -> None:
    net, x, y = model(), torch.randn(4, 8), torch.zeros(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SILENT[way](net, x, y)


def test_the_entry_of_the_warning_trains_what_is_stuck_without_it(half: torch.dtype) -> None:
    def trained(lists: Any) -> float:
        torch.manual_seed(0)
        net, x, y = model(), 0.1 * torch.randn(64, 8), torch.zeros(64, 1)
        # In fp16 the gradient of 1e10 overflows at every scale.
        settings: Any = {"loss_scale": 1.0, "on_nonfinite": "skip"}
        handle = autoamp.init(dtype=half, device_type="cpu", scope="modules", lists=lists, **settings)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        for _ in range(40):
            optimizer.zero_grad()
            loss = nn.BCELoss()(net(x), y)
            loss.backward()
            optimizer.step()
        handle.deactivate()
        return float(loss.detach())

    with pytest.warns(UserWarning, match=r'or add fp32 = \["sigmoid"\] to the list file'):
        assert trained(None) > 99.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained({"fp32": ["sigmoid"]}) < 0.1


@pytest.mark.parametrize("scope", ["global", "modules"])
def test_a_program_that_casts_by_itself_is_not_told(half: torch.dtype, scope: str) -> None:
    handle = autoamp.init(dtype=half, device_type="cpu", scope=scope)
    net = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cpu", dtype=half):
            out = net(torch.randn(4, 8))
        if scope == "modules":
            nn.BCELoss()(out.float(), torch.zeros(4, 1))
        handle.deactivate()
        nn.BCELoss()(out.float(), torch.zeros(4, 1))
