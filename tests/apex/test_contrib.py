"""Cross entropy and clipping of contrib against torch's, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.apex.contrib.clip_grad import clip_grad_norm_
from autoamp.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from autoamp.errors import UsageError

LABELS = torch.tensor([1, 0, 4, 2])


def by_torch(logits: Tensor, labels: Tensor, smoothing: float, padding: int) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=padding, reduction="none", label_smoothing=smoothing)


@pytest.mark.parametrize(("smoothing", "padding"), [(0.0, 0), (0.1, -100), (1.0, 2)])
@pytest.mark.parametrize("active", [False, True])
def test_cross_entropy(smoothing: float, padding: int, active: bool, half: torch.dtype) -> None:
    logits = torch.randn(4, 5).to(half)
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    labels = torch.where(LABELS == 0, padding, LABELS)
    expected = by_torch(exact, labels, smoothing, padding)
    if active:
        autoamp.init(dtype=half, device_type="cpu")
    losses = SoftmaxCrossEntropyLoss.apply(mine, labels, smoothing, padding, True)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses, expected.float())
    losses.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(mine.grad, exact.grad.to(half))
    rounded = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding)
    torch.testing.assert_close(rounded, expected.to(half))


def test_cross_entropy_of_fp64_and_its_defaults() -> None:
    logits = torch.randn(4, 5, dtype=torch.float64)
    losses = SoftmaxCrossEntropyLoss.apply(logits, LABELS.int())
    torch.testing.assert_close(losses, by_torch(logits, LABELS, 0.0, 0))
    assert losses[1] == 0


@pytest.mark.parametrize(("logits", "labels"), [((2, 3, 5), (2, 3)), ((4, 5), (4, 1)), ((4, 5), (3,))])
def test_cross_entropy_shapes(logits: tuple[int, ...], labels: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"view\(-1, classes\)"):
        SoftmaxCrossEntropyLoss.apply(torch.randn(logits), torch.zeros(labels, dtype=torch.long))


def with_grads(*grads: Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    return [*parameters, nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("active", [False, True])
def test_clipping(norm_type: float, active: bool, half: torch.dtype) -> None:
    grads = [torch.randn(3).to(half), torch.randn(2, 2), torch.randn(4, dtype=torch.float64)]
    parameters = with_grads(*grads)
    exact = torch.cat([grad.double().flatten() for grad in grads]).norm(norm_type)
    if active:
        autoamp.init(dtype=half, device_type="cpu")
    norm = clip_grad_norm_(parameters, 0.5, norm_type)
    torch.testing.assert_close(norm, exact, rtol=1e-6, atol=0)
    for parameter, grad in zip(parameters, grads, strict=False):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, (grad.double() * 0.5 / (exact + 1e-6)).to(grad.dtype))
    assert parameters[-1].grad is None


def test_clipping_leaves_small_gradients() -> None:
    parameters = with_grads(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(iter(parameters), 5.1).item() == 5.0
    assert parameters[0].grad.tolist() == [3.0, 4.0]  # type: ignore[union-attr]
    assert clip_grad_norm_(parameters[0], 1).item() == 5.0
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6, 0.8]))
    assert clip_grad_norm_([], 1.0).item() == 0.0


def test_clipping_of_halves_does_not_overflow() -> None:
    parameters = with_grads(torch.full((100,), 6e4, dtype=torch.float16))
    assert clip_grad_norm_(parameters, 100.0).item() == pytest.approx(6e5, rel=1e-3)
    torch.testing.assert_close(parameters[0].grad, torch.full((100,), 10.0, dtype=torch.float16))


def test_clipping_what_is_not_finite() -> None:
    parameters = with_grads(torch.tensor([1.0, float("inf")]), torch.ones(2))
    with pytest.raises(UsageError, match="inf"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert parameters[1].grad.tolist() == [1.0, 1.0]  # type: ignore[union-attr]
    assert clip_grad_norm_(parameters, 1.0).item() == float("inf")
    assert parameters[1].grad.tolist() == [0.0, 0.0]  # type: ignore[union-attr]
