"""What training programs do around a scaled loss, at every level: clipping, penalties, accumulation, two optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import autoamp

LISTS = {"extends": [], "fp16": ["linear"], "fp32": ["mse_loss", "binary_cross_entropy_with_logits"]}
LEVELS = ["O0", "O1", "O2", "O3"]
# How far gradients may be from those in fp32.
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2}


def initialize(models: Any, optimizers: Any, **kwargs: Any) -> None:
    defaults = {"device_type": "cpu", "verbosity": 0, "lists": LISTS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        autoamp.initialize(models, optimizers, **{**defaults, **kwargs})


def network() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1))


def data(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator)


def gradients(params: Iterable[Any]) -> Tensor:
    return torch.cat([p.grad.detach().float().flatten() for p in params])


def close(got: Tensor, expected: Tensor, half: torch.dtype) -> None:
    assert (got - expected).norm() < TOLERANCE[half] * expected.norm()


# -- clipping --


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("where", "clear"), [("inside", "optimizer"), ("after", "model")])
def test_clipping(level: str, where: str, clear: str) -> None:
    """Inside of the block gradients have its scale, and so has the norm to clip to."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scale, limit = 16.0, 0.01
    initialize(model, optimizer, opt_level=level, dtype=torch.float16, loss_scale=scale)
    inputs, targets = data()
    for _ in range(3):
        (optimizer if clear == "optimizer" else model).zero_grad()
        before = [p.detach().clone() for p in autoamp.master_params(optimizer)]
        with autoamp.scale_loss(mse_loss(model(inputs).float(), targets), optimizer) as scaled:
            scaled.backward()
            if where == "inside":
                norm = nn.utils.clip_grad_norm_(autoamp.master_params(optimizer), limit * scale) / scale
        if where == "after":
            norm = nn.utils.clip_grad_norm_(autoamp.master_params(optimizer), limit)
        assert norm > 0.1
        torch.testing.assert_close(gradients(autoamp.master_params(optimizer)).norm().item(), limit, atol=0, rtol=0.01)
        optimizer.step()
        if level != "O3":
            moved = [a - b for a, b in zip(before, autoamp.master_params(optimizer), strict=True)]
            length = torch.cat([m.flatten() for m in moved]).norm().item()
            torch.testing.assert_close(length, limit, atol=0, rtol=0.01)


# -- double backward --


def penalized(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with a gradient penalty, as in WGAN-GP, by plain autograd."""
    inputs = inputs.clone().requires_grad_()
    loss = mse_loss(model(inputs).float(), targets)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + (slope.float().norm(dim=1) - 0.1).pow(2).mean() * 50


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gradient_penalty(level: str, half: torch.dtype) -> None:
    inputs, targets = data()
    reference = network()
    penalized(reference, inputs, targets).backward()
    expected = gradients(reference.parameters())
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    initialize(model, optimizer, opt_level=level, dtype=half, loss_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        with autoamp.scale_loss(penalized(model, inputs, targets), optimizer) as scaled:
            scaled.backward()
        close(gradients(autoamp.master_params(optimizer)), expected, half)
    mse_only = network()
    mse_loss(mse_only(inputs), targets).backward()
    assert (gradients(mse_only.parameters()) - expected).norm() > 0.1 * expected.norm()
    before = [p.detach().clone() for p in autoamp.master_params(optimizer)]
    optimizer.step()
    assert not any(map(torch.equal, before, autoamp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_double_backward_through_the_scaled_loss(level: str, half: torch.dtype) -> None:
    """The penalty is on gradients of the scaled loss, and divided by the scale within the block."""
    inputs, targets = data()
    reference = network()
    penalized(reference, inputs, targets).backward()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    initialize(model, optimizer, opt_level=level, dtype=half, loss_scale=8.0)
    leaf = inputs.clone().requires_grad_()
    loss = mse_loss(model(leaf).float(), targets)
    with autoamp.scale_loss(loss, optimizer) as scaled:
        (slope,) = torch.autograd.grad(scaled, leaf, create_graph=True)
        assert optimizer.param_groups[0]["params"][0].grad is None
        penalty = (slope.float().div(8.0).norm(dim=1) - 0.1).pow(2).mean() * 50
        (scaled + penalty * 8.0).backward()
    close(gradients(autoamp.master_params(optimizer)), gradients(reference.parameters()), half)


# -- accumulation --


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", ["blocks", "delayed", "one block", "many steps"])
def test_small_batches_add_up_to_the_large_one(level: str, way: str, half: torch.dtype) -> None:
    inputs, targets = data(12)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reference = network()
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    initialize(model, optimizer, opt_level=level, dtype=half, loss_scale=64.0)
    for _ in range(2 if way == "many steps" else 1):
        plain.zero_grad()
        mse_loss(reference(inputs), targets).backward()
        plain.step()
        optimizer.zero_grad()
        parts = list(zip(inputs.chunk(4), targets.chunk(4), strict=True))
        losses = (mse_loss(model(x).float(), y) / 4 for x, y in parts)
        if way == "one block":
            first = next(losses)
            with autoamp.scale_loss(first, optimizer) as scaled:
                scaled.backward()
                for loss in losses:
                    (loss * 64.0).backward()
        else:
            for index, loss in enumerate(losses):
                with autoamp.scale_loss(loss, optimizer, delay_unscale=way == "delayed" and index < 3) as scaled:
                    scaled.backward()
        close(gradients(autoamp.master_params(optimizer)), gradients(reference.parameters()), half)
        optimizer.step()
    wanted = torch.cat([p.detach().flatten() for p in reference.parameters()])
    got = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


# -- two networks, two optimizers, three losses --


class Game:
    """A generator against a critic, whose critic's losses have scalers 0 and 1 and the generator's 2."""

    def __init__(self, level: str, half: torch.dtype) -> None:
        torch.manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = network()
        self.of_generator = torch.optim.Adam(self.generator.parameters(), 0.02, eps=1e-4)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), 0.02, eps=1e-4)
        initialize(
            [self.generator, self.critic], [self.of_generator, self.of_critic], opt_level=level, dtype=half,
            num_losses=3, loss_scale=autoamp.DynamicLossScaler(init_scale=2.0**8),
        )  # fmt: skip

    def play(self, *, real: float = 1.0, fake: float = 1.0, fool: float = 1.0) -> None:
        """Play a round, each loss times a factor of its own."""
        noise, images = torch.randn(8, 2), torch.randn(8, 4) * 0.3 + 1
        self.of_critic.zero_grad()
        self._loss(self.critic(images), 1.0, real, self.of_critic, 0)
        forged = self.generator(noise)
        self._loss(self.critic(forged.detach()), 0.0, fake, self.of_critic, 1)
        self.of_critic.step()
        self.of_generator.zero_grad()
        self._loss(self.critic(forged), 1.0, fool, self.of_generator, 2)
        self.of_generator.step()

    def _loss(self, logits: Tensor, label: float, factor: float, optimizer: Any, loss_id: int) -> None:
        loss = binary_cross_entropy_with_logits(logits.float(), torch.full((8, 1), label)) * factor
        with autoamp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        return tuple([p.detach().clone() for p in m.parameters()] for m in (self.generator, self.critic))  # type: ignore[return-value]


def moved(one: list[Tensor], other: list[Tensor]) -> bool:
    return not all(map(torch.equal, one, other))


@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_are_skipped_apart(level: str) -> None:
    game = Game(level, torch.float16)
    start = game.weights()
    game.play()
    after = game.weights()
    assert moved(start[0], after[0])
    assert moved(start[1], after[1])
    cases: list[tuple[dict[str, float], tuple[bool, bool], int]] = [
        ({"real": torch.inf}, (True, False), 0),
        ({"fake": torch.nan}, (True, False), 1),
        ({"fool": torch.inf}, (False, True), 2),
    ]
    for factors, expected, blamed in cases:
        before, scales = game.weights(), [s["loss_scale"] for s in list(autoamp.state_dict().values())[:3]]
        game.play(**factors)
        after = game.weights()
        assert (moved(before[0], after[0]), moved(before[1], after[1])) == expected
        now = [s["loss_scale"] for s in list(autoamp.state_dict().values())[:3]]
        assert [a / b for a, b in zip(now, scales, strict=True)] == [0.5 if i == blamed else 1.0 for i in range(3)]
    assert autoamp.state_dict()["skipped_steps"] == 3
