"""The steps of O2 that are timed, each once and checked, and the bytes that they move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks import o2
from tests.benchmarks.traffic import Traffic

WIDTH = 64


@pytest.mark.parametrize("optimizer", o2.OPTIMIZERS)
def test_step(benchmark: Any, optimizer: str) -> None:
    training = o2.Step(WIDTH, 2, 4, optimizer).training("O2")
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.run()
    benchmark(training.run)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert {parameter.dtype for parameter in training.model.parameters()} == {torch.bfloat16}
    assert any(not torch.equal(old, new.detach()) for old, new in zip(before, training.model.parameters(), strict=True))


def test_without_a_step_gradients_come_and_go_and_weights_stay() -> None:
    training = o2.Step(WIDTH, 2, 4).training(o2.UNSTEPPED)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    came: list[bool] = []
    training.backward(lambda: came.extend(parameter.grad is not None for parameter in training.model.parameters()))
    training.rest()
    assert came == [True] * len(before)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, training.model.parameters(), strict=True))
    # Gradients written.
    assert training.bytes_by_parameter() == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize("way", ["autocast", "O2"])
def test_bytes_of_adamw(way: str) -> None:
    # Autocast: casts of weights 6, gradients 2 + 2 + 4, AdamW 4 * 4 + 3 * 4. O2: gradients 2, widened 6, AdamW 28, and
    # 6 to copy the masters down.
    training = o2.Step(WIDTH, 2, 4).training(way)
    training.run()
    assert training.bytes_by_parameter() == pytest.approx(42.0, abs=0.3)


def test_bytes_of_operators() -> None:
    old, new = torch.ones(10), torch.zeros(10)
    with Traffic([]) as traffic:
        traffic.everything = True
        new.copy_(old)
        assert traffic.moved == 80
        new.view(2, 5)
        assert traffic.moved == 80
        torch._foreach_add_([new], [old])
        assert traffic.moved == 80 + 120
        torch._fused_sgd_(
            [new], [old], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
            is_first_step=False,
        )  # fmt: skip
        assert traffic.moved == 80 + 120 + 120
