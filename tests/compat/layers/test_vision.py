"""What image models import from contrib, against plain formulas in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoamp.compat.layers import vision
from autoamp.errors import UsageError

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    torch.testing.assert_close(
        found.detach().double(), expected.detach(), rtol=factor * TOLERANCE[dtype], atol=factor * TOLERANCE[dtype]
    )


def backward(found: Tensor, expected: Tensor) -> None:
    factors = torch.randn(expected.shape, dtype=torch.float64)
    (found.double() * factors).sum().backward()
    (expected * factors).sum().backward()


# -- group norm --


def group_norm_by_hand(value: Tensor, groups: int, weight: Tensor, bias: Tensor, act: str) -> Tensor:
    rows = []
    for sample in value:
        for part in sample.chunk(groups):
            rows.append((part - part.mean()) / (part.var(unbiased=False) + 1e-3).sqrt())
    shape = (1, -1, *[1] * (value.dim() - 2))
    found = torch.stack(rows).view(value.shape) * weight.view(shape) + bias.view(shape)
    return found * torch.sigmoid(found) if act else found


@dtypes
@pytest.mark.parametrize("act", ["", "silu", "Swish"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_group_norm(dtype: torch.dtype, act: str, channels_last: bool, mixed: bool) -> None:
    torch.manual_seed(0)
    norm = vision.GroupNorm(3, 6, eps=1e-3, act=act, dtype=torch.float32 if mixed else dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.bias.normal_()
    value = (torch.randn(2, 6, 4, 5) * 2 + 1).to(dtype)
    value = (value.to(memory_format=torch.channels_last) if channels_last else value).requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (value, norm.weight, norm.bias)]
    found = norm(value)
    assert found.dtype is dtype
    if channels_last:
        assert found.is_contiguous(memory_format=torch.channels_last)
    expected = group_norm_by_hand(exact[0], 3, exact[1], exact[2], act)
    assert_near(found, expected, dtype)
    backward(found, expected)
    for one, other in zip((value, norm.weight, norm.bias), exact, strict=True):
        assert one.grad.dtype is one.dtype
        coarser = max(dtype, one.dtype, key=lambda kind: TOLERANCE[kind])
        assert_near(one.grad, other.grad, coarser, 10.0)


def test_group_norm_without_weights_and_with_an_unknown_activation() -> None:
    value = torch.randn(2, 6, 3)
    found = vision.GroupNorm(3, 6, affine=False)(value)
    torch.testing.assert_close(found, nn.GroupNorm(3, 6, affine=False)(value))
    nn.GroupNorm(3, 6).load_state_dict(vision.GroupNorm(3, 6).state_dict())
    with pytest.raises(UsageError, match="act='relu'"):
        vision.GroupNorm(3, 6, act="relu")
    with pytest.raises(UsageError, match="act='relu'"):
        vision.torch_group_norm(value, 3, None, None, 1e-5, "relu")


# -- batch norm in NHWC --


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_batch_norm(dtype: torch.dtype, fuse: bool, added: bool) -> None:
    torch.manual_seed(0)
    norm = vision.BatchNorm2d_NHWC(5, fuse_relu=fuse)
    plain = nn.BatchNorm2d(5).double()
    with torch.no_grad():
        plain.weight.copy_(norm.weight.uniform_(0.5, 2.0))
        plain.bias.copy_(norm.bias.normal_())
    value, z = ((torch.randn(4, 3, 2, 5) + 1).to(dtype).requires_grad_() for _ in range(2))
    if added and not fuse:
        with pytest.raises(UsageError, match="fuse_relu=True"):
            norm(value, z)
        return
    exact, exact_z = (tensor.detach().double().requires_grad_() for tensor in (value, z))
    found = norm(value, z) if added else norm(value)
    expected = plain(exact.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) + (exact_z if added else 0)
    expected = expected.relu() if fuse else expected
    assert found.dtype is dtype
    assert_near(found, expected, dtype, 2.0)
    assert_near(norm.running_var, plain.running_var, dtype)
    assert int(norm.num_batches_tracked) == 1
    backward(found, expected)
    assert_near(value.grad, exact.grad, dtype, 10.0)
    if added:
        assert_near(z.grad, exact_z.grad, dtype)
    norm.eval()
    plain.eval()
    evaluated = plain(exact.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    assert_near(norm(value), evaluated.relu() if fuse else evaluated, dtype, 2.0)


def test_batch_norm_in_a_group_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="group_size=2"):
        vision.BatchNorm2d_NHWC(5, bn_group=2)


# -- focal loss --


def focal_by_hand(logits: Tensor, targets: Tensor, real: int, alpha: float, gamma: float, smoothing: float) -> Tensor:
    total = logits.new_zeros(())
    for row, target in zip(logits.flatten(0, -2), targets.flatten().tolist(), strict=True):
        for index in range(real if target != -2 else 0):
            p = 1 / (1 + torch.exp(-row[index]))
            positive = index == target
            aim = 1 - smoothing / 2 if positive else smoothing / 2
            entropy = -(aim * torch.log(p) + (1 - aim) * torch.log(1 - p))
            total = total + (alpha * (1 - p) ** gamma if positive else (1 - alpha) * p**gamma) * entropy
    return total / 3.0


@dtypes
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("gamma", [2.0, 0.5])
def test_focal_loss(dtype: torch.dtype, smoothing: float, gamma: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(2, 4, 6) * 3).to(dtype).requires_grad_()
    targets = torch.tensor([[0, 4, -1, -2], [3, -2, 1, -1]])
    exact = logits.detach().double().requires_grad_()
    found = vision.focal_loss(logits, targets, torch.tensor([3.0]), 5, 0.24, gamma, smoothing)
    expected = focal_by_hand(exact, targets, 5, 0.24, gamma, smoothing)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert found.dim() == 0
    assert_near(found, expected, torch.float64 if dtype is torch.float64 else torch.float32)
    found.backward()
    expected.backward()
    assert_near(logits.grad, exact.grad, dtype)
    assert not logits.grad[..., 5].any(), "padding"
    assert not logits.grad[0, 3].any(), "ignored"


def test_focal_loss_of_extreme_logits() -> None:
    logits = torch.tensor([[80.0, -80.0], [-80.0, 80.0]], requires_grad=True)
    loss = vision.FocalLoss.apply(logits, torch.tensor([0, 0]), torch.tensor([1.0]), 2, 0.25, 2.0)
    loss.backward()
    # The second anchor is wrong twice over: 80 for each class, times its weight.
    assert loss.item() == pytest.approx(80 * (0.25 + 0.75))
    assert logits.grad.isfinite().all()
    with pytest.raises(UsageError, match=r"must be \(\*, classes\)"):
        vision.focal_loss(logits, torch.tensor([0]), torch.tensor([1.0]), 2, 0.25, 2.0)


def test_by_the_names_of_apex(apex: Any) -> None:
    from apex.contrib.focal_loss import focal_loss
    from apex.contrib.focal_loss.focal_loss import focal_loss as function
    from apex.contrib.group_norm import GroupNorm
    from apex.contrib.groupbn import BatchNorm2d_NHWC
    from apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC as by_its_module

    assert (GroupNorm, BatchNorm2d_NHWC) == (vision.GroupNorm, vision.BatchNorm2d_NHWC)
    assert by_its_module is BatchNorm2d_NHWC
    # In Apex the name is the module's.
    assert (focal_loss.FocalLoss, focal_loss.focal_loss, function) == (
        vision.FocalLoss, vision.focal_loss, vision.focal_loss
    )  # fmt: skip
