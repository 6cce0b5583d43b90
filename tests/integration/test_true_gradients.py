"""Gradients after a block are true, and cleared ones are gone, for whatever program reads, replaces or clears them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.optimizers import FusedSGD


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


class Training:
    """A network at O2 or under an FP16_Optimizer, whose first layer has gradients of exactly ``value`` if asked."""

    def __init__(self, way: str, make: Callable[[Any], Any] | None = None, scale: float = 128.0) -> None:
        self.model = network()
        params = list(self.model.parameters())
        inner = torch.optim.SGD(params, lr=0.1) if make is None else make(params)
        self.optimizer: Any = inner
        if way == "O2":
            autoamp.initialize(
                self.model, inner, opt_level="O2", dtype=torch.float16, device_type="cpu", loss_scale=scale, verbosity=0
            )
        else:
            self.model.half()
            self.optimizer = FP16_Optimizer(inner, static_loss_scale=scale)
        self.way = way
        self.weight: Any = self.model[0].weight

    def backward(self, value: float = 1.0, *layers: int) -> None:
        """Give every element of the layers' weights and biases (all layers by default) the gradient ``value``."""
        chosen = [self.model[place] for place in layers] if layers else list(self.model)
        loss = sum((p.float() * value).sum() for layer in chosen for p in layer.parameters() if p.requires_grad)
        if self.way == "O2":
            with autoamp.scale_loss(loss, self.optimizer) as scaled:  # type: ignore[arg-type]
                scaled.backward()
        else:
            self.optimizer.backward(loss)

    def steps_by(self, value: float) -> None:
        """Train a step by gradients of this value and hold that the masters move by them alone."""
        before = [master.detach().clone() for master in self.masters()]
        self.backward(value)
        self.optimizer.step()
        for master, old in zip(self.masters(), before, strict=True):
            torch.testing.assert_close(master.detach(), old - 0.1 * value)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def masters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


@pytest.fixture(params=[128.0, 1.0])
def scale(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(params=["O2", "FP16_Optimizer"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@torch.jit.script
def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def as_data(gradient: Tensor) -> Tensor:
    tensor = torch.empty(0)
    tensor.data = gradient
    return tensor


READERS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "product with itself": (lambda g: g * g, 4.0),
    "comparison with itself": (lambda g: torch.equal(g, g) * torch.ones(()), 1.0),
    "stack": (lambda g: torch.stack([g, g]), 2.0),
    "lerp": (lambda g: torch.lerp(g, g, 0.5), 2.0),
    "addcmul": (lambda g: torch.addcmul(g, g, g), 6.0),
    "foreach norm": (lambda g: torch._foreach_norm([g])[0], 24.0**0.5),
    "flatten": (lambda g: torch._utils._flatten_dense_tensors([g, g]), 2.0),
    "tensor of it": (lambda g: torch.tensor(g), 2.0),
    "scripted function": (doubled, 4.0),
    "dlpack": (lambda g: torch.from_dlpack(torch.utils.dlpack.to_dlpack(g)), 2.0),
    "data of another": (as_data, 2.0),
    "numpy": (lambda g: torch.from_numpy(g.numpy()), 2.0),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:.*torch.jit")
def test_a_gradient_is_true_however_it_is_read(way: str, reader: str) -> None:
    training = Training(way)
    training.backward(2.0)
    read, expected = READERS[reader]
    found = read(training.weight.grad).float()
    torch.testing.assert_close(found, torch.full_like(found, expected))


def momentum(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fused(params: Any) -> Any:
    return FusedSGD(params, lr=0.1)


def test_a_layer_that_is_frozen_after_its_gradients_were_zeroed_stays(way: str, scale: float) -> None:
    training = Training(way, fused, scale)
    training.backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)
    training.model[0].requires_grad_(False)
    frozen = training.weights()[:2]
    for _ in range(2):
        training.backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
    assert all(map(torch.equal, training.weights()[:2], frozen))


def zero_once_and_clear_on_the_model(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=False)
    training.backward()
    training.optimizer.step()
    training.model.zero_grad()


def replace_a_master_gradient_and_clear_on_the_model(training: Training) -> None:
    for master in training.masters():
        master.grad = master.grad * 0.5
    training.optimizer.step()
    training.model.zero_grad()


def clear_parameters(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=False)
    for p in training.model.parameters():
        p.grad = None


def test_a_gradient_that_was_zeroed_and_then_cleared_on_the_model_does_not_come_back(way: str) -> None:
    training = Training(way)
    training.backward(4.0)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)
    training.backward(4.0)
    training.optimizer.step()
    training.model.zero_grad()
    training.steps_by(1.0)


def test_a_master_gradient_that_was_replaced_and_then_cleared_on_the_model_does_not_come_back(
    way: str, scale: float
) -> None:
    training = Training(way, scale=scale)
    training.backward(4.0)
    for master in training.masters():
        master.grad = master.grad * 0.5
    training.optimizer.step()
    training.model.zero_grad()
    training.steps_by(1.0)


@pytest.mark.parametrize("foreach", [True, False])
def test_the_gradients_of_the_model_are_clipped_in_each_step(way: str, foreach: bool) -> None:
    training = Training(way)
    for _ in range(2):
        training.backward(2.0)
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), 13.0**0.5, foreach=foreach)
        assert float(norm) == pytest.approx(2 * 13.0**0.5)
        before = [master.detach().clone() for master in training.masters()]
        training.optimizer.step()
        for master, value in zip(training.masters(), before, strict=True):
            torch.testing.assert_close(master.detach(), value - 0.1)
        training.optimizer.zero_grad()


@pytest.mark.parametrize("make", [fused, momentum, lambda params: torch.optim.SGD(params, lr=0.1)])
def test_nothing_is_stepped_by_gradients_that_the_model_cleared(
    way: str, scale: float, make: Callable[[Any], Any]
) -> None:
    training = Training(way, make, scale)
    before = training.weights()
    training.backward()
    training.model.zero_grad()
    training.optimizer.step()
    assert all(map(torch.equal, training.weights(), before))


def test_clip_master_grads_takes_gradients_that_were_replaced() -> None:
    training = Training("FP16_Optimizer")
    training.backward(1.0, 0)
    for p in training.model[0].parameters():
        p.grad = torch.full_like(p, 8.0)
    assert training.optimizer.clip_master_grads(3.0) == pytest.approx(24.0)
    before = training.masters()[0].detach().clone()
    training.optimizer.step()
    torch.testing.assert_close(training.masters()[0].detach(), before - 0.1)
