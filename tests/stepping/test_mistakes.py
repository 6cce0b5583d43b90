"""A loss that is run backward in place of the scaled one, and fp16 gradients that vanish unscaled."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from autoamp.errors import UsageError
from autoamp.stepping.mistakes import BackwardWatch, VanishingGradients


def losses() -> tuple[Tensor, Tensor]:
    loss = torch.ones(2, requires_grad=True).sum()
    return loss, loss * 8.0


def test_the_scaled_loss_is_proven_and_the_loss_alone_is_an_error() -> None:
    loss, scaled = losses()
    watch = BackwardWatch(loss, scaled)
    watch.check("SGD")
    scaled.backward()
    assert watch.proven
    watch.check("SGD")
    loss, scaled = losses()
    watch = BackwardWatch(loss, scaled)
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match=r"block of SGD the loss itself .* Call scaled_loss.backward\(\)"):
        watch.check("SGD")
    watch.end()
    # No hook is left.
    scaled.backward()
    assert not watch.proven


def test_a_loss_without_gradients_is_not_watched() -> None:
    BackwardWatch(torch.ones(()), torch.ones(()) * 2.0).check("SGD")


@pytest.mark.parametrize(
    ("grads", "told"),
    [
        ([0.0, 0.0], "100%"),
        ([1e-7, 0.0], "100%"),
        ([1e-6, 1e-6, 1.0], "67%"),
        # Most of what is not 0 is held.
        ([1e-6, 1.0, 1.0], None),
        ([0.0, 0.0, 0.0, 1.0], None),
        # That is no underflow.
        ([float("inf"), float("nan")], None),
        ([], None),
    ],
)
def test_gradients_below_what_fp16_holds_are_told_once(grads: list[float], told: str | None) -> None:
    param = torch.ones(len(grads), requires_grad=True)
    param.grad = torch.tensor(grads)
    optimizer, vanishing = torch.optim.SGD([param], lr=0.1), VanishingGradients()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            vanishing.look(optimizer, [param, torch.ones(1)])
    assert [str(one.message).split()[0] for one in caught] == ([] if told is None else [told])


def test_steps_are_looked_at_now_and_then() -> None:
    param = torch.ones(1, requires_grad=True)
    optimizer, vanishing = torch.optim.SGD([param], lr=0.1), VanishingGradients()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 11):
            param.grad = torch.zeros(1) if 1 < step < 10 else torch.ones(1)
            vanishing.look(optimizer, [param])
        assert not caught
        param.grad = torch.zeros(1)
        for _ in range(90):
            vanishing.look(optimizer, [param])
    assert len(caught) == 1
