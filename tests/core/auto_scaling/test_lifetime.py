"""`auto_scale()` begins, rests and ends; models and optimizers under it are collected, copied, pickled and compiled."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.core import AutoScale
from tests.core.auto_scaling.programs import gradients, make, train_step


def test_auto_scale_ends_by_stop_and_with_its_handle(handle: autoamp.Handle) -> None:
    model, optimizer, x = make()
    original = Tensor.retain_grad
    scaling = handle.auto_scale()
    assert handle.auto_scale() is scaling
    assert Tensor.retain_grad is not original
    (model(x).sum() * float("inf")).backward()
    scaling.stop()
    assert not scaling.active
    assert Tensor.retain_grad is original
    # The step still reads the check from before.
    optimizer.step()
    assert handle.skipped_steps == 1
    assert handle.auto_scale().active
    assert Tensor.retain_grad is not original
    handle.deactivate()
    assert Tensor.retain_grad is original
    with pytest.raises(autoamp.UsageError, match="not active"):
        handle.auto_scale()
    with autoamp.init(enabled=False).auto_scale() as disabled:
        assert not disabled.active


def test_auto_scale_rests_while_another_region_is_active(handle: autoamp.Handle, scaling: AutoScale) -> None:
    patched = torch.autograd.backward
    with autoamp.region(device_type="cpu", dtype=torch.bfloat16):
        assert torch.autograd.backward is not patched
    model, optimizer, x = make()
    train_step(optimizer, model(x).sum() * float("inf"))
    assert handle.skipped_steps == 1


def test_models_and_optimizers_are_collectable(scaling: AutoScale, collected: Any) -> None:
    model, optimizer, x = make()
    hidden = model[0](x)
    hidden.retain_grad()
    model[2](hidden).sum().backward()
    optimizer.step()
    references = [weakref.ref(model[0].weight), weakref.ref(optimizer), weakref.ref(hidden)]
    del model, optimizer, hidden
    collected()
    assert [reference() for reference in references] == [None] * 3


def test_a_compiled_model_has_the_gradients_of_the_eager_one(scaling: AutoScale) -> None:
    model, optimizer, x = make()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    got = gradients(model)
    train_step(optimizer, model(x).square().mean())
    torch.testing.assert_close(got, gradients(model))
    torch._dynamo.reset()


def noted(module: nn.Module, into: Any, out: Any) -> None:
    """A hook that pickles by its name."""


def test_modules_with_hooks_are_copied_and_pickled(scaling: AutoScale) -> None:
    layer = nn.Linear(2, 2)
    layer.register_full_backward_hook(noted)
    loaded = pickle.loads(pickle.dumps(layer))
    assert list(loaded._backward_hooks.values()) == [noted]
    copied = copy.deepcopy(layer)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    train_step(optimizer, copied(torch.ones(1, 2)).sum())


def test_functions_taken_before_auto_scale_began_are_told_of_it(handle: autoamp.Handle) -> None:
    backward, scale = torch.autograd.backward, torch.amp.GradScaler("cpu", init_scale=8.0).scale
    entered = torch.autocast.__enter__
    model, _, x = make()
    before = model(x)
    try:
        torch.autocast.__enter__ = lambda region: entered(region)  # type: ignore[method-assign]
        scaling = handle.auto_scale()
        backward((model(x).float() * 1e-8).sum())
        assert all(param.grad is not None and bool(param.grad.any()) for param in model.parameters())
        with torch.autocast("cpu", enabled=False):
            pass
        assert torch.equal(model(x), before)
        scale(model(x).sum())
        assert scaling.yielded_to == "torch.amp.GradScaler"
    finally:
        torch.autocast.__enter__ = entered  # type: ignore[method-assign]
