"""Under `auto_scale()` steps that overflowed are skipped, whatever the program does with their gradients."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.core import AutoScale, UnreadFlags, runtime_of
from tests.core.auto_scaling.programs import NO_CASTS, assert_equal, gradients, make, train_step
from tests.waits import counted_reads


@pytest.mark.parametrize("with_closure", [False, True])
def test_an_optimizer_that_gc_freeze_hides_is_guarded_at_its_first_step(with_closure: bool) -> None:
    parameter, factor = nn.Parameter(torch.ones(2)), 1.0
    optimizer = torch.optim.SGD([parameter], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter * factor).sum()
        loss.backward()
        return loss

    def step() -> None:
        optimizer.step(closure) if with_closure else (closure(), optimizer.step())

    gc.freeze()
    try:
        handle = autoamp.init(**NO_CASTS)
        handle.auto_scale()
        step()
    finally:
        gc.unfreeze()
    assert parameter.tolist() == [0.5, 0.5]
    scale, factor = handle.loss_scale, 3e38
    step()
    # The gradient is finite. Times the scale it overflows.
    assert handle.loss_scale < scale
    assert handle.skipped_steps == 1


# Times a scale of 2**16 this leaves fp32's range; times 2**15 it does not.
EDGE = 2.0**112


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_without_dimensions_are_trained(ranks: int, fake_ranks: Callable[[int], None]) -> None:
    """Such as a learned temperature."""
    fake_ranks(ranks)
    handle = autoamp.init(**NO_CASTS)
    handle.auto_scale()
    temperature = nn.Parameter(torch.tensor(2.0))
    temperature.register_hook(lambda gradient: gradient.clone())
    optimizer = torch.optim.SGD([temperature], lr=0.5)
    for factor, expected in ((1.0, 1.5), (float("inf"), 1.5), (1.0, 1.0)):
        optimizer.zero_grad()
        (temperature * factor).backward()
        assert temperature.grad is not None
        assert temperature.grad.shape == ()
        optimizer.step()
        assert temperature.item() == expected
    assert handle.skipped_steps == 1


def test_gradients_of_an_overflowed_pass_are_zero(handle: autoamp.Handle, scaling: AutoScale) -> None:
    """A program that clips, keeps or steps them by hand never sees inf of the loss scale."""
    model, _optimizer, x = make()
    by_hand = nn.Linear(2, 2)
    x.requires_grad_()
    hidden = model(x)
    hidden.retain_grad()
    (by_hand(hidden).sum() * float("inf")).backward()
    for tensor in (*model.parameters(), *by_hand.parameters(), x, hidden):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_the_error_names_the_parameters_that_overflowed(handle: autoamp.Handle, scaling: AutoScale) -> None:
    handle.max_consecutive_skips = 2
    model, optimizer, x = make()
    model[0].requires_grad_(False)
    train_step(optimizer, model(x).sum() * float("inf"))
    with pytest.raises(autoamp.NonFiniteGradientsError, match=r"first in Sequential\.2\.weight, Sequential\.2\.bias"):
        train_step(optimizer, model(x).sum() * float("inf"))


def test_optimizers_that_step_in_backward_update_the_scaler_once(handle: autoamp.Handle, scaling: AutoScale) -> None:
    model, _optimizer, x = make()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = copy.deepcopy(list(model.parameters()))
    (model(x).sum() * float("inf")).backward()
    assert_equal(list(model.parameters()), before)
    assert (handle.loss_scale, handle.skipped_steps) == (2.0**15, 4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["tensor", "in place", "post accumulate"])
def test_no_hook_hides_an_overflow(where: str, ranks: int, fake_ranks: Callable[[int], None]) -> None:
    fake_ranks(ranks)
    handle = autoamp.init(**NO_CASTS)
    handle.auto_scale()
    param, other, cleared = (torch.ones(2, requires_grad=True) for _ in range(3))
    cleared.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    optimizer = torch.optim.SGD([param, other], lr=0.5)

    def hides(gradient: Tensor) -> Tensor:
        return gradient.clamp(-1.0, 1.0).nan_to_num() * 0 + 10.0

    if where == "post accumulate":
        param.register_post_accumulate_grad_hook(lambda p: (p.grad.copy_(hides(p.grad)), None)[1])
    else:
        param.register_hook(hides if where == "tensor" else lambda g: (g.copy_(hides(g)), None)[1])
    (param.sum() * EDGE + other.sum() + cleared.sum()).backward()
    assert param.grad is not None
    assert other.grad is not None
    # Other ranks learn of the overflow by the reduction of the gradients.
    assert param.grad.isfinite().tolist() == [ranks == 1] * 2
    assert other.grad.tolist() == [1.0, 1.0]
    optimizer.step()
    assert param.tolist() == other.tolist() == [1.0, 1.0]
    assert (handle.skipped_steps, handle.loss_scale) == (1, 2.0**15)


def test_dropping_the_gradients_of_one_optimizer_leaves_the_skip_of_another(
    handle: autoamp.Handle, scaling: AutoScale
) -> None:
    """As a GAN does with the gradients that the generator's pass leaves at the critic."""
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    opt_g, opt_c = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (generator, critic))
    (critic(generator(torch.ones(1, 2))).sum() * float("inf")).backward()
    # The step is of the second loss alone, and nothing is said of it.
    train_step(opt_c, critic(torch.ones(1, 2)).sum())
    assert handle.skipped_steps == 0
    opt_g.step()
    assert (handle.skipped_steps, handle.loss_scale) == (1, 2.0**15)


def test_what_was_accumulated_before_an_overflow_stays(handle: autoamp.Handle, scaling: AutoScale) -> None:
    model, _optimizer, x = make()
    by_hand = torch.ones(2, requires_grad=True)
    model(x * by_hand.sum()).sum().backward()
    before = [by_hand.grad.clone(), *gradients(model)]  # type: ignore[union-attr]
    (model(x * by_hand.sum()).sum() * float("inf")).backward()
    assert_equal([by_hand.grad, *gradients(model)], before)
    model(x * by_hand.sum()).sum().backward()
    assert_equal([by_hand.grad, *gradients(model)], [2 * gradient for gradient in before])


def test_a_step_of_many_passes_waits_for_the_device_once(
    handle: autoamp.Handle, scaling: AutoScale, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = counted_reads(monkeypatch)
    model, optimizer, x = make()
    for _ in range(3):
        for _ in range(4):
            model(x).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert len(reads) == 3


def test_passes_without_a_step_do_not_pile_up(handle: autoamp.Handle, scaling: AutoScale) -> None:
    model, optimizer, x = make()
    for count in range(200):
        (model(x).sum() * (float("inf") if count == 3 else 1.0)).backward()
    assert len(runtime_of(handle).optimizers.guard(optimizer).grads.checks) < 100
    optimizer.step()
    assert (handle.skipped_steps, handle.loss_scale) == (1, 2.0**15)


def test_an_overflow_after_a_step_in_the_middle_of_a_pass(handle: autoamp.Handle, scaling: AutoScale) -> None:
    first, last = (torch.ones(1, requires_grad=True) for _ in range(2))
    optimizers = {id(param): torch.optim.SGD([param], lr=0.5) for param in (first, last)}
    for param in (first, last):
        param.register_post_accumulate_grad_hook(lambda p: optimizers[id(p)].step())
    # The gradient of `last` arrives first, and is stepped.
    for factor, now in ((EDGE, (0.5, 1.0)), (1.0, (-0.5, 0.5))):
        (first * factor + last).backward()
        assert (float(last.detach()), float(first.detach())) == now
        assert (handle.skipped_steps, handle.loss_scale) == (1, 2.0**15)


@pytest.mark.parametrize("in_the_middle", [True, False])
def test_optimizers_that_take_flags_on_the_device(
    handle: autoamp.Handle, scaling: AutoScale, in_the_middle: bool
) -> None:
    runtime_of(handle).optimizers.scalers[0].unread = UnreadFlags(("cpu",))
    params = first, last = [torch.ones(1, requires_grad=True) for _ in range(2)]
    optimizers = {id(param): torch.optim.Adam([param], lr=0.5, fused=True) for param in params}
    for param in params if in_the_middle else ():
        param.register_post_accumulate_grad_hook(lambda p: optimizers[id(p)].step())
    for factor, now in ((EDGE, 1.0), (1.0, 0.5)):
        (first * factor + last).backward()
        if not in_the_middle:
            for optimizer in optimizers.values():
                optimizer.step()
        assert float(first.detach()) == pytest.approx(now, abs=1e-4)
        first.grad = last.grad = None
        assert handle.loss_scale == 2.0**15
    assert handle.skipped_steps == (1 if in_the_middle else 2)
