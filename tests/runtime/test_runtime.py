"""What a handle drives: its lifecycle, and what it leaves behind."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from autoamp.runtime import Handle
from tests.runtime.shared import Training, init, steps

# `torch.optim.optimizer` is not to be had as an attribute.
optimizer_module = importlib.import_module("torch.optim.optimizer")


def test_no_hook_of_an_optimizer_stays() -> None:
    hooks = optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks
    before = [list(held) for held in hooks]
    for _ in range(3):
        handle = init()
        steps(handle, Training(), 1.0)
        handle.deactivate()
        assert [list(held) for held in hooks] == before


def test_optimizers_and_models_can_be_dropped_while_the_handle_stays(
    handle: Handle, collected: Callable[[], None]
) -> None:
    def used() -> list[weakref.ref[Any]]:
        one, other = Training(torch.optim.Adam), Training()
        steps(handle, one, 1.0, 1e30)
        with handle.inference(one.model), torch.no_grad():
            one.model(one.inputs)
        scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 1)
        steps(handle, one, 1.0)
        scheduler.step()
        wrapped = handle.wrap_optimizer(other.optimizer, num_loss=2)
        with wrapped.scale_loss(other.loss()) as scaled:
            scaled.backward()
        return [
            weakref.ref(kept) for kept in (one.model, one.optimizer, one.model.weight, other.optimizer, other.model)
        ]

    references = used()
    collected()
    assert [reference() for reference in references] == [None] * 5
    assert handle.skipped_steps == 1
    # And the losses of optimizers that nobody wrapped can be scaled again.
    steps(handle, Training(), 1.0)
