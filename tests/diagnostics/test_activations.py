"""Gradients of activations: beside numpy, without the loss scale, and which of them would be in half."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnostics.profiles import op

BATCH, WIDTH = 64, 8


def exponents(values: Any) -> dict[str, int]:
    values = np.asarray(values)
    found = np.unique(np.frexp(values[values != 0])[1] - 1, return_counts=True)
    return {str(int(e)): int(n) for e, n in zip(*found, strict=True)}


class Net(nn.Module):
    """Two layers with a relu between them: all of its gradients are written out below."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.first(x)))
        return out


def gradients_by_numpy(net: Net, x: Tensor) -> dict[str, Any]:
    """Return the gradients of the mean of squares by operator: of each what its result's gradient is."""
    first, last = (layer.weight.detach().double().numpy() for layer in (net.first, net.last))
    hidden = x.double().numpy() @ first.T
    out = np.maximum(hidden, 0) @ last.T
    of_out = 2 * out / BATCH
    of_relu = of_out @ last
    return {"out": of_out, "relu": of_relu, "first": of_relu * (hidden > 0)}


@pytest.mark.parametrize("scaled", ["scale_loss", "a part of it", "auto_scale", "not at all"])
def test_beside_numpy(handle: Any, scaled: str) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with handle.profile_ranges() as ranges:
        for _ in range(2):
            loss = net(x).square().mean()
            if scaled == "auto_scale":
                with handle.auto_scale():
                    loss.backward()
            elif scaled == "not at all":
                loss.backward()
            else:
                with handle.scale_loss(loss, optimizer) as multiplied:
                    (multiplied / 4 if scaled == "a part of it" else multiplied).backward()
            optimizer.step()
    expected = gradients_by_numpy(net, x)
    part = 4 if scaled == "a part of it" else 1
    rows = {row.op: row.gradients for row in ranges.ops if row.op in ("aten::relu", "aten::pow")}
    mms = [row.gradients for row in ranges.ops if row.op == "aten::mm"]
    for found, values in (
        (mms[0], expected["first"]),
        (rows["aten::relu"], expected["relu"]),
        (mms[1], expected["out"]),
    ):
        assert found.to_dict()["exponents"] == {e: 2 * n for e, n in exponents(values / part).items()}
        assert found.zeros == 2 * int((values == 0).sum())
    assert rows["aten::pow"].to_dict()["exponents"] == exponents(np.full(2 * BATCH, 1 / BATCH / part))
    assert ranges.to_dict()["sees_activations"] is True
    assert json.loads(ranges.to_json())["ops"][0]["gradients"]["exponents"] == mms[0].to_dict()["exponents"]


def test_they_choose_the_loss_scale(handle: Any) -> None:
    """Activations whose gradients underflow, while those of the parameters, which are sums of them, do not."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with handle.profile_ranges() as ranges:
        with handle.scale_loss((net(torch.full((2**10, 1), 2.0**10)) * 2.0**-30).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert ranges.gradients["weight"].to_dict()["exponents"] == {"-10": 1}
    assert op(ranges, "mm").gradients.to_dict()["exponents"] == {"-30": 2**10}
    assert op(ranges, "mm").in_half
    # Those of the product are kept from 2**5 on, that of the weight from 1 on; what is summed has a gradient of 1.
    assert ranges.loss_scales() == tuple(2.0**k for k in range(5, 16))
    assert "of 2,048 gradients of activations in half 0 overflow, 0 become 0, 1,024 are subnormal;" in ranges.verdict()
    assert ranges.to_dict()["ops"][0]["gradients"]["float16"] == {"underflow": 0, "subnormal": 1024, "overflow": 0}


def test_which_would_be_in_half_by_the_lists(handle: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Unflatten(1, (2, 2)), nn.Flatten())
    x, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with handle.profile_ranges() as ranges:
        out = net(x)
        y = torch.tanh(out.t().contiguous().t()) + out
        y.add_(1.0)
        alone = torch.tanh(x) + out
        loss = F.cross_entropy(y + alone, targets)
        loss.backward()
    half = {(row.op.removeprefix("aten::"), row.site.line): row.in_half for row in ranges.ops}
    by_name = {name: [value for (op, _), value in half.items() if op == name] for name, _ in half}
    assert by_name["addmm"] == by_name["relu"] == by_name["add_"] == [True]
    assert sorted(by_name["tanh"]) == [False, True]
    # Sums of half and fp32 are fp32; within cross_entropy all is.
    assert by_name["_log_softmax"] == [False]
    assert sorted(by_name["add"]) == [False, False, True]


def test_a_graph_that_is_run_again_counts_again_and_not_twice(handle: Any) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with handle.profile_ranges() as ranges:
        product = torch.mm(torch.ones(3, 2), weight)
        loss = product.sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
    assert op(ranges, "mm").gradients.elements == 3 * 6
    # It has ended: nobody counts any more.
    loss.backward()
    assert op(ranges, "mm").gradients.elements == 3 * 6


def test_results_are_those_without_and_checkpoints_are_left_alone(handle: Any) -> None:
    def trained(around: Any, reentrant: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        with around:
            for _ in range(2):
                x = torch.randn(3, 4, requires_grad=True)
                out = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=reentrant)
                if not reentrant:
                    torch.autograd.grad(out.square().sum(), x, create_graph=True)
                out.square().sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    for reentrant in (False, True):
        pairs = zip(
            trained(handle.profile_ranges(), reentrant), trained(handle.disable_casts(), reentrant), strict=True
        )
        assert all(torch.equal(one, other) for one, other in pairs)
