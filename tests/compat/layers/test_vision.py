"""Group norm, batch norm and focal loss: what `test_layers` does not compare."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoamp.compat.layers import vision
from autoamp.errors import UsageError

# -- group norm --


def test_group_norm_without_weights_and_with_an_unknown_activation() -> None:
    value = torch.randn(2, 6, 3)
    found = vision.GroupNorm(3, 6, affine=False)(value)
    torch.testing.assert_close(found, nn.GroupNorm(3, 6, affine=False)(value))
    nn.GroupNorm(3, 6).load_state_dict(vision.GroupNorm(3, 6).state_dict())
    with pytest.raises(UsageError, match="act='relu'"):
        vision.GroupNorm(3, 6, act="relu")
    with pytest.raises(UsageError, match="act='relu'"):
        vision.torch_group_norm(value, 3, None, None, 1e-5, "relu")


@pytest.mark.parametrize("act", ["", "silu"])
def test_group_norm_keeps_channels_last(act: str, half: torch.dtype) -> None:
    norm = vision.GroupNorm(3, 6, act=act)
    value = torch.randn(2, 6, 4, 5).to(half)
    found = norm(value.to(memory_format=torch.channels_last))
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, norm(value))


# -- batch norm in NHWC --


@pytest.mark.parametrize("fuse", [False, True])
def test_batch_norm_matches_the_statistics_of_torch(fuse: bool) -> None:
    norm, plain, value = vision.BatchNorm2d_NHWC(5, fuse_relu=fuse), nn.BatchNorm2d(5), torch.randn(4, 3, 2, 5) + 1
    for _ in range(2):
        norm(value)
        plain(value.permute(0, 3, 1, 2))
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    evaluated = plain.eval()(value.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(norm.eval()(value), evaluated.relu() if fuse else evaluated)


def test_batch_norm_refuses() -> None:
    with pytest.raises(ValueError, match="group_size=2"):
        vision.BatchNorm2d_NHWC(5, bn_group=2)
    with pytest.raises(UsageError, match="fuse_relu=True"):
        vision.BatchNorm2d_NHWC(5)(torch.randn(4, 3, 2, 5), torch.randn(4, 3, 2, 5))


# -- focal loss --


def focal(logits: Tensor, targets: Tensor, alpha: float, gamma: float, smoothing: float) -> Tensor:
    """Return the loss by the formula of Lin et al. 2017, for 3 positive anchors."""
    hit = F.one_hot(targets.clamp(min=0), logits.shape[-1]).double() * (targets >= 0)[..., None]
    p = torch.sigmoid(logits)
    aims = hit * (1 - smoothing) + smoothing / 2
    entropy = -(aims * p.log() + (1 - aims) * (1 - p).log())
    weights = torch.where(hit == 1, alpha * (1 - p) ** gamma, (1 - alpha) * p**gamma)
    return (weights * entropy)[targets != -2].sum() / 3.0


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)],
)
@pytest.mark.parametrize(("gamma", "smoothing"), [(2.0, 0.0), (0.5, 0.2)])
def test_focal_loss(dtype: torch.dtype, tolerance: float, gamma: float, smoothing: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(2, 4, 6) * 3).to(dtype).requires_grad_()
    targets = torch.tensor([[0, 4, -1, -2], [3, -2, 1, -1]])
    exact = logits.detach().double().requires_grad_()
    found = vision.focal_loss(logits, targets, torch.tensor([3.0]), 5, 0.24, gamma, smoothing)
    expected = focal(exact[..., :5], targets, 0.24, gamma, smoothing)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-9 if dtype is torch.float64 else 1e-4, atol=0)
    found.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
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
