"""Hooks while a scaled pass runs: ours before all others, and whose pass calls."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoamp.auto_scaling.backward_pass import ScaledPass, reached_by
from autoamp.auto_scaling.hooks import GradientHook, PostAccumulateHook, RunningPasses, is_ours
from autoamp.scaling.loss_scale import StaticLossScaler


def scaled(passes: RunningPasses, loss: Tensor, **settings: Any) -> ScaledPass:
    """Run one pass at a scale of 8."""
    running = ScaledPass(StaticLossScaler(8.0), {}, math.inf, now=passes.now, **settings)
    with passes.opened(running):
        passes.arrivals.hook(running.take(*reached_by([loss], None)))
        with passes.claimed(running, [loss]):
            loss.backward(torch.full_like(loss, 8.0))
    return running


def hook_of(kind: Any, passes: RunningPasses, hook: Any, tensor: Tensor | None = None) -> Any:
    return kind(hook, passes, contextlib.nullcontext, tensor)


def test_hooks_that_were_there_see_what_arrived_and_nothing_stays() -> None:
    passes = RunningPasses()
    x = torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    early = x.register_hook(lambda gradient: seen.append((passes.now(), gradient)))
    x.register_hook(lambda gradient: gradient + 1)
    running = scaled(passes, x.sum())
    assert [now is running for now, _ in seen] == [True]
    assert torch.equal(seen[0][1], torch.ones(2))
    assert torch.equal(x.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]
    assert passes.now() is None
    x.sum().backward()
    assert torch.equal(seen[1][1], torch.ones(2))
    early.remove()
    assert len(x._backward_hooks) == 1  # type: ignore[arg-type]


def test_hooks_that_are_held_twice_stay_until_both_let_go() -> None:
    passes = RunningPasses()
    x = torch.ones(2, requires_grad=True)
    passes.arrivals.hook([x])
    passes.arrivals.hook([x])
    assert len(x._backward_hooks) == 1  # type: ignore[arg-type]
    passes.arrivals.unhook([x])
    assert len(x._backward_hooks) == 1  # type: ignore[arg-type]
    passes.arrivals.unhook([x])
    assert not x._backward_hooks


def test_a_run_within_that_is_another_s_is_told_apart() -> None:
    passes = RunningPasses()
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen: list[bool] = []
    y.register_hook(lambda _: seen.append(passes.now() is None))

    def runs(gradient: Tensor) -> None:
        with torch.enable_grad():
            torch.autograd.grad(y.sum(), y)

    x.register_hook(runs)
    scaled(passes, x.sum() + y.sum())
    assert sorted(seen) == [False, True]
    assert torch.equal(y.grad, torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hooks_within_the_graph_see_true_gradients_in_full_precision(dtype: torch.dtype) -> None:
    passes = RunningPasses()
    x = torch.ones(2, requires_grad=True)
    hidden = x.to(dtype)
    seen: list[Tensor] = []
    hidden.register_hook(hook_of(GradientHook, passes, lambda g: seen.append(g.clone()), hidden))
    hidden.register_hook(hook_of(GradientHook, passes, lambda g: g.mul_(3).neg(), hidden))
    hidden.register_hook(hook_of(GradientHook, passes, lambda g: (g.mul_(2), None)[1], hidden))
    scaled(passes, hidden.float().sum() * 2.0**-20)
    assert torch.equal(seen[0], torch.full((2,), 2.0**-20))
    assert torch.equal(x.grad, torch.full((2,), -6 * 2.0**-20))  # type: ignore[arg-type]


def test_hooks_of_modules_get_and_give_tuples() -> None:
    passes = RunningPasses()
    layer, seen = nn.Linear(2, 2), []
    layer.register_full_backward_hook(
        hook_of(GradientHook, passes, lambda _, into, out: (seen.extend([*into, *out]), (into[0] * 2,))[1])
    )
    layer.register_full_backward_pre_hook(hook_of(GradientHook, passes, lambda _, out: (out[0] * 3,)))
    x = torch.ones(1, 2, requires_grad=True)
    scaled(passes, layer(x).sum())
    assert torch.equal(seen[1], torch.full((1, 2), 3.0))
    torch.testing.assert_close(seen[0], 3 * layer.weight.detach().sum(0, keepdim=True))
    assert torch.equal(x.grad, 2 * seen[0])  # type: ignore[arg-type]
    assert torch.equal(layer.bias.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [GradientHook, PostAccumulateHook])
def test_no_hook_hides_an_overflow_from_other_ranks(kind: Any) -> None:
    passes = RunningPasses()
    x = torch.ones(2, requires_grad=True)
    if kind is GradientHook:
        x.register_hook(hook_of(kind, passes, torch.nan_to_num, x))
    else:
        x.register_post_accumulate_grad_hook(hook_of(kind, passes, lambda p: (p.grad.nan_to_num_(), None)[1], x))
    scaled(passes, (x * torch.tensor([1.0, math.inf])).sum(), cleans=False)
    assert x.grad is not None
    assert not x.grad.isfinite().any()


def test_what_a_hook_begins_is_no_part_of_the_pass() -> None:
    passes = RunningPasses()
    x = torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    x.register_hook(lambda _: seen.append(passes.joinable()))
    x.register_hook(hook_of(GradientHook, passes, lambda _: seen.append(passes.joinable()), x))
    running = scaled(passes, x.sum())
    assert [now is running for now in seen] == [True, False]


def noted(gradient: Tensor) -> None:
    """A hook that pickles by its name."""


def test_a_hook_is_copied_and_pickled_as_what_it_stands_for() -> None:
    hook = hook_of(GradientHook, RunningPasses(), noted)
    assert is_ours(hook)
    assert hook.__name__ == "noted"
    assert pickle.loads(pickle.dumps(hook)) is noted
    assert isinstance(copy.deepcopy(hook), GradientHook)
