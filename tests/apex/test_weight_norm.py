"""Weight norm against its formula and torch's own, and that it goes as it came."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import autoamp
from autoamp.apex.reparameterization.weight_norm import WeightNorm, apply_weight_norm, remove_weight_norm
from autoamp.errors import UsageError


@pytest.mark.parametrize("dim", [0, 1, None])
def test_linear_is_torchs(dim: int | None) -> None:
    mine = nn.Linear(4, 3, dtype=torch.float64)
    theirs = weight_norm(copy.deepcopy(mine), dim=-1 if dim is None else dim)
    apply_weight_norm(mine, "weight", dim)
    input = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(mine(input), theirs(input))
    mine(input).square().sum().backward()
    theirs(input).square().sum().backward()
    g, v = theirs.parametrizations.weight.original0, theirs.parametrizations.weight.original1
    assert mine.weight_g.shape == g.shape
    torch.testing.assert_close(mine.weight_g.grad, g.grad)
    torch.testing.assert_close(mine.weight_v.grad, v.grad)


def test_formula_and_gradcheck() -> None:
    layer = apply_weight_norm(nn.Linear(3, 2, dtype=torch.float64), "weight")
    with torch.no_grad():
        layer.weight_g.mul_(3.0)
    v = layer.weight_v.detach()
    input = torch.randn(2, 3, dtype=torch.float64)
    weight = layer.weight_g.detach() * v / v.square().sum(1, keepdim=True).sqrt()
    torch.testing.assert_close(layer(input), input @ weight.T + layer.bias)

    def run(g: Tensor, v: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight_g": g, "weight_v": v}, (input,))

    assert torch.autograd.gradcheck(run, (layer.weight_g, layer.weight_v))


def test_weight_follows_its_parameters() -> None:
    layer = apply_weight_norm(nn.Linear(3, 2, bias=False), "weight")
    input = torch.randn(2, 3)
    expected = 2 * layer(input)
    with torch.no_grad():
        layer.weight_g.mul_(2.0)
    torch.testing.assert_close(layer(input), expected)
    # A second backward has a history of its own.
    layer(input).sum().backward()
    layer(input).sum().backward()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.lstm = nn.LSTM(5, 6, 2)
        self.out = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.norm(self.conv(self.embed(tokens).transpose(1, 2)))
        return self.out(self.lstm(features.permute(2, 0, 1))[0])  # type: ignore[no-any-return]


TOKENS = torch.arange(18).reshape(2, 9) % 7
NORMED = ["conv.weight", *[f"lstm.weight_{kind}_l{layer}" for layer in (0, 1) for kind in ("ih", "hh")], "out.weight"]


@pytest.mark.parametrize("hook_child", [True, False])
def test_whole_network_and_back(hook_child: bool) -> None:
    net = Net()
    expected, names = net(TOKENS), [name for name, _ in net.named_parameters()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    assert apply_weight_norm(net, hook_child=hook_child) is net
    normed = {name for name, _ in net.named_parameters()} - set(names)
    assert normed == {f"{name}_{part}" for name in NORMED for part in "gv"}
    torch.testing.assert_close(net(TOKENS), expected)
    assert remove_weight_norm(net) is net
    assert sorted(name for name, _ in net.named_parameters()) == sorted(names)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), state[name])
    assert not any(module._forward_pre_hooks for module in net.modules())
    # The LSTM steps the weights that it has now.
    net(TOKENS).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_removed_keeps_what_was_trained() -> None:
    net = apply_weight_norm(Net())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    net.eval()
    expected = net(TOKENS)
    torch.testing.assert_close(remove_weight_norm(net, remove_all=True)(TOKENS), expected)


def test_second_time_takes_no_parts_of_the_first() -> None:
    net = apply_weight_norm(Net(), "out.weight")
    apply_weight_norm(net)
    assert {name for name, _ in net.named_parameters() if name.endswith(("_g", "_v"))} == {
        f"{name}_{part}" for name in NORMED for part in "gv"
    }
    with pytest.raises(UsageError, match=r"'out\.weight'"):
        apply_weight_norm(net, "out.weight")


def test_weight_norm_is_removed_from_the_named_parameter_alone() -> None:
    net = apply_weight_norm(Net())
    remove_weight_norm(net, "out.weight")
    assert "out.weight" in dict(net.named_parameters())
    assert "conv.weight_g" in dict(net.named_parameters())
    with pytest.raises(UsageError, match=r"'out\.weight' of Net"):
        remove_weight_norm(net, "out.weight")


@pytest.mark.parametrize("name", ["nope", "nope.weight", "conv.nope"])
def test_unknown_names(name: str) -> None:
    net = Net()
    with pytest.raises(UsageError, match=r"choose among: embed\.weight"):
        apply_weight_norm(net, name)
    assert apply_weight_norm(net, "conv.bias") is net
    assert "conv.bias" in dict(net.named_parameters())


def test_frozen_stays_frozen() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    apply_weight_norm(layer)
    assert not layer.weight_g.requires_grad
    assert not layer.weight_v.requires_grad
    assert not remove_weight_norm(layer).weight.requires_grad


def test_copies_are_apart() -> None:
    net = apply_weight_norm(nn.Linear(3, 2))
    other = copy.deepcopy(net)
    input = torch.randn(2, 3)
    expected = net(input)
    with torch.no_grad():
        other.weight_g.zero_()
    assert not torch.equal(other(input), expected)
    torch.testing.assert_close(net(input), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_trains_under_levels(level: str, half: torch.dtype) -> None:
    net = apply_weight_norm(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net, optimizer = autoamp.initialize(net, optimizer, opt_level=level, dtype=half, device_type="cpu", loss_scale=16.0)
    for _ in range(2):
        with autoamp.scale_loss(net(TOKENS).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = net.state_dict()
    assert {value.dtype for value in after.values() if value.is_floating_point()} == {torch.float32}
    for name in NORMED:
        for part in "gv":
            assert not torch.equal(after[f"{name}_{part}"], before[f"{name}_{part}"]), name


@pytest.mark.parametrize("dim", [0, None])
def test_computes_in_fp32_for_half_weights(dim: int | None) -> None:
    layer = apply_weight_norm(nn.Linear(64, 1, bias=False), "weight", dim)
    with torch.no_grad():
        layer.weight_v.fill_(3e4)
    layer.half()
    # The norm of v, 2.4e5, is out of fp16's range.
    weight = WeightNorm("weight", dim).compute_weight(layer)
    assert weight.dtype is torch.float16
    torch.testing.assert_close(weight.detach(), (layer.weight_g.detach() / 8).expand(1, 64))
