"""Gradients of half parameters with masters: plain tensors with true values; what is cleared stays cleared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

import autoamp
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.optimizers import FusedSGD

SCALE = 128.0


@torch.jit.script
def doubled(x: Tensor) -> Tensor:
    return x + x


class Own(Tensor):
    """A subclass that a program may look at gradients by."""


READERS: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda g: (g * g).sum().sqrt() / 2,
    "lerp": lambda g: torch.zeros_like(g).lerp(g, 1.0)[0],
    "equal": lambda g: 0.25 if torch.equal(g, torch.full((4,), 0.25)) else -1.0,
    "stack": lambda g: torch.stack([g, g])[1][0],
    "foreach_norm": lambda g: torch._foreach_norm([g])[0] / 2,
    "addcmul": lambda g: torch.zeros(4).addcmul(g, torch.ones(4))[0],
    "flatten": lambda g: torch._utils._flatten_dense_tensors([g])[0],
    "tensor": lambda g: torch.tensor(g.tolist())[0],
    "script": lambda g: doubled(g)[0] / 2,
    "dlpack": lambda g: from_dlpack(to_dlpack(g))[0],
    "nested": lambda g: torch.nested.nested_tensor([g]).values()[0],
    "subclass": lambda g: g.as_subclass(Own)[0],
    "data": lambda g: g.data[0],
    "numpy": lambda g: g.numpy()[0],
    "copy": lambda g: copy.deepcopy(g)[0],
}


def trained(
    way: str, dtype: torch.dtype = torch.float16, make: Any = None
) -> tuple[nn.Parameter, Any, Callable[[], None]]:
    """Return a parameter of 4 ones, its optimizer, and a pass that gives each of them the gradient 0.25."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self) -> Tensor:
            return self.weight.mean()

    model = Model()
    inner = (make or (lambda params: torch.optim.SGD(params, lr=1.0)))(model.parameters())
    if way == "FP16_Optimizer":
        optimizer = FP16_Optimizer(inner, static_loss_scale=SCALE) if model.half() else None
        return model.weight, optimizer, lambda: optimizer.backward(model().float())  # type: ignore[union-attr]
    autoamp.initialize(
        model, inner, opt_level="O2", dtype=torch.float16, loss_scale=SCALE, device_type="cpu", verbosity=0
    )

    def backward() -> None:
        with autoamp.scale_loss(model(), inner) as scaled:
            scaled.backward()

    return model.weight, inner, backward


@pytest.fixture(autouse=True)
def no_handle_left() -> Any:
    yield
    handle = autoamp.current_handle()
    if handle is not None:
        handle.deactivate()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("whose", ["model", "master"])
@pytest.mark.parametrize("way", ["O2", "FP16_Optimizer"])
def test_a_gradient_after_the_block_is_a_plain_tensor_with_its_true_value(way: str, whose: str, reader: str) -> None:
    param, optimizer, backward = trained(way)
    backward()
    gradient: Any = param.grad if whose == "model" else optimizer.param_groups[0]["params"][0].grad
    assert type(gradient) is Tensor
    assert float(READERS[reader](gradient)) == 0.25


@pytest.mark.parametrize("way", ["O2", "FP16_Optimizer"])
def test_a_gradient_is_true_where_it_becomes_the_data_of_a_tensor(way: str) -> None:
    param, _, backward = trained(way)
    backward()
    other = torch.zeros(4)
    other.data = param.grad  # type: ignore[assignment]
    assert other.tolist() == [0.25] * 4


CLEARED: dict[str, Callable[[nn.Parameter, Any], None]] = {
    "optimizer": lambda param, optimizer: optimizer.zero_grad(),
    "optimizer, to 0": lambda param, optimizer: optimizer.zero_grad(set_to_none=False),
    "parameter": lambda param, optimizer: setattr(param, "grad", None),
    "parameter, to 0": lambda param, optimizer: param.grad.zero_(),  # type: ignore[union-attr]
    "master": lambda param, optimizer: setattr(optimizer.param_groups[0]["params"][0], "grad", None),
}


@pytest.mark.parametrize("second", CLEARED)
@pytest.mark.parametrize("first", CLEARED)
@pytest.mark.parametrize("make", [None, lambda params: FusedSGD(params, lr=1.0)], ids=["SGD", "FusedSGD"])
def test_each_step_goes_by_its_own_gradient(make: Any, first: str, second: str) -> None:
    param, optimizer, backward = trained("O2", make=make)
    for clear in (CLEARED[first], CLEARED[second]):
        backward()
        optimizer.step()
        clear(param, optimizer)
    backward()
    optimizer.step()
    assert param.tolist() == [0.25] * 4


@pytest.mark.parametrize("make", [None, lambda params: FusedSGD(params, lr=1.0)], ids=["SGD", "FusedSGD"])
def test_a_parameter_that_is_frozen_after_gradients_were_set_to_zero_stays(make: Any) -> None:
    param, optimizer, backward = trained("O2", make=make)
    backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    param.requires_grad_(False)
    param.grad = None
    optimizer.step()
    assert param.tolist() == [0.75] * 4


@pytest.mark.parametrize("make", [None, lambda params: FusedSGD(params, lr=1.0)], ids=["SGD", "FusedSGD"])
def test_a_gradient_that_is_cleared_between_backward_and_step_is_not_stepped(make: Any) -> None:
    param, optimizer, backward = trained("O2", make=make)
    backward()
    param.grad = None
    optimizer.step()
    assert param.tolist() == [1.0] * 4


def test_a_replaced_gradient_of_a_master_is_stepped_and_goes_with_that_of_the_parameter() -> None:
    param, optimizer, backward = trained("O2")
    master = optimizer.param_groups[0]["params"][0]
    backward()
    master.grad = torch.full((4,), 0.5)
    optimizer.step()
    assert param.tolist() == [0.5] * 4
    backward()
    master.grad = torch.full((4,), 0.5)
    param.grad = None
    backward()
    assert param.grad.tolist() == master.grad.tolist() == [0.25] * 4  # type: ignore[union-attr]


def test_a_gradient_that_was_kept_can_be_given_back() -> None:
    param, optimizer, backward = trained("O2")
    backward()
    kept = param.grad
    optimizer.zero_grad()
    param.grad = kept
    optimizer.step()
    assert param.tolist() == [0.75] * 4


@pytest.mark.parametrize("way", ["clip", "inspect"])
def test_an_fp16_optimizer_goes_by_a_replaced_gradient(way: str) -> None:
    param, optimizer, backward = trained("FP16_Optimizer")
    backward()
    param.grad = torch.full((4,), 100.0)
    if way == "clip":
        assert optimizer.clip_master_grads(1.0) == pytest.approx(200.0)
        optimizer.step()
        assert param.tolist() == pytest.approx([0.5] * 4, abs=1e-3)
    else:
        assert optimizer.inspect_master_grad_data()[0][0].tolist() == [100.0] * 4
