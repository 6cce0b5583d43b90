"""Half gradients that wait for the step: what a program sees of them, and what steps make of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autoamp
from autoamp import fp16_utils, kernels, optimizers
from autoamp.runtime import current_handle
from autoamp.scaling import workspace
from autoamp.stepping import master_of
from autoamp.stepping.attach import _inner_cell
from autoamp.stepping.half_gradients import LeftHalf, ScaledHalf
from tests.stepping.networks import backward, equal, loss_of, masters, network, o2, snapshot

BF16, FP16 = torch.bfloat16, torch.float16


class WholeAdamW(torch.optim.AdamW):
    """Steps as AdamW does. It is no class of torch, so its gradients are widened at once."""


class WholeAdam(optimizers.FusedAdam):
    """The same for FusedAdam."""


def trained(make: Callable[..., Any], seed: int = 0) -> tuple[Any, Any]:
    model = network()
    optimizer = make(model.parameters())
    o2(model, optimizer, dtype=BF16, loss_scale=None)
    backward(model, optimizer, seed)
    return model, optimizer


def waiting(optimizer: Any) -> list[bool]:
    return [type(master) is LeftHalf for master in masters(optimizer)]


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is torch's way, of which kernels have steps of their own."""
    monkeypatch.setattr(kernels, "opened", lambda _: None)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_ON_CPU", 24)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def test_a_gradient_waits_until_somebody_looks() -> None:
    model, optimizer = trained(adamw)
    halves = [p.grad for p in model.parameters()]
    assert all(waiting(optimizer))
    assert all(grad is not None and grad.dtype is BF16 for grad in halves)
    assert masters(optimizer)[1].grad.dtype is torch.float32
    # One look is one for all.
    assert not any(waiting(optimizer))
    for half, master, before in zip(model.parameters(), masters(optimizer), halves, strict=True):
        assert type(master) is Tensor
        assert half.grad is master.grad
        assert torch.equal(master.grad, before.float())


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (adamw, lambda params: WholeAdamW(params, lr=0.1, fused=True)),
        (
            lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
            lambda params: WholeAdamW(params, lr=0.1, foreach=True),
        ),
        (lambda params: optimizers.FusedAdam(params, lr=0.1), lambda params: WholeAdam(params, lr=0.1)),
    ],
    ids=["fused", "foreach", "FusedAdam"],
)
def test_steps_have_the_bits_of_a_step_by_wide_gradients(one: Any, other: Any) -> None:
    ends = []
    for make in (one, other):
        model, optimizer = trained(make)
        assert all(waiting(optimizer)) is (make is one)
        for seed in range(3):
            optimizer.step()
            optimizer.zero_grad()
            backward(model, optimizer, seed)
        # The last gradient adds to another.
        backward(model, optimizer, 4)
        optimizer.step()
        ends.append(snapshot(model, optimizer))
        assert all(torch.equal(p, master_of(p).to(BF16)) for p in model.parameters())  # type: ignore[union-attr]
    assert equal(*ends)


@pytest.mark.usefixtures("small_parts")
def test_a_step_by_parts_is_one_step() -> None:
    model, optimizer = trained(adamw)
    groups, params = optimizer.param_groups, optimizer.param_groups[0]["params"]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    fused, parts = torch._fused_adamw_, []

    def watched(some: list[Tensor], *args: Any, **kwargs: Any) -> None:
        parts.append([param.numel() for param in some])
        fused(some, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", watched)
        optimizer.step()
    assert parts == [[32], [8, 16], [2]]
    assert calls == ["before", "after"]
    assert optimizer.param_groups is groups
    assert groups[0]["params"] is params
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    # The gradients are there after the step too.
    assert all(master.grad.dtype is torch.float32 for master in masters(optimizer))
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_add_up_in_fp32() -> None:
    model, optimizer = trained(adamw)
    first = [p.grad.float() for p in model.parameters()]
    optimizer.zero_grad()
    backward(model, optimizer, 1)
    second = [p.grad.float() for p in model.parameters()]
    for within_block in (True, False):
        optimizer.zero_grad()
        backward(model, optimizer, 0)
        if within_block:
            backward(model, optimizer, 1)
        else:
            loss_of(model, 1).backward()
        for master, one, other in zip(masters(optimizer), first, second, strict=True):
            assert torch.equal(master.grad, one + other)


def test_clearing_widens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(adamw)
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    optimizer.zero_grad()
    assert all(p.grad is None for p in (*model.parameters(), *masters(optimizer)))
    backward(model, optimizer)
    model.zero_grad()
    monkeypatch.undo()
    assert all(master.grad is None for master in masters(optimizer))
    backward(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in (*model.parameters(), *masters(optimizer)))


def test_one_who_writes_to_a_master_that_waits() -> None:
    model, optimizer = trained(adamw)
    first, second, third, _ = masters(optimizer)
    before = first.detach().clone()
    first.grad = None
    second.grad = torch.full_like(second, 2.0)
    del third.grad
    optimizer.step()
    assert next(model.parameters()).grad is None
    assert third.grad is None
    assert torch.equal(first, before)
    assert torch.equal(list(model.parameters())[1].grad, torch.full_like(second, 2.0))  # type: ignore[arg-type]


def test_clipping_before_the_step() -> None:
    model, optimizer = trained(adamw)
    norm = torch.nn.utils.clip_grad_norm_(masters(optimizer), 0.01)
    assert norm.dtype is torch.float32
    optimizer.zero_grad()
    backward(model, optimizer)
    # Half gradients are clipped in half precision, and their masters' with them.
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert max(float(master.grad.abs().max()) for master in masters(optimizer)) <= 0.0101


def test_copies_and_pickles_are_plain() -> None:
    _, optimizer = trained(adamw)
    master = masters(optimizer)[0]
    twin = copy.deepcopy(master)
    assert type(twin) is Tensor
    assert torch.equal(twin.grad, master.grad)  # type: ignore[arg-type]
    _, optimizer = trained(adamw)
    again = pickle.loads(pickle.dumps(masters(optimizer)[0]))
    assert type(again) is Tensor
    assert torch.equal(again, masters(optimizer)[0])


@pytest.mark.usefixtures("small_parts")
def test_an_error_in_the_middle_leaves_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(adamw)
    groups, params = optimizer.param_groups, list(masters(optimizer))
    fused, calls = torch._fused_adamw_, []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        fused(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()
    assert optimizer.param_groups is groups
    assert all(one is other for one, other in zip(masters(optimizer), params, strict=True))
    assert all(master.grad.dtype is torch.float32 for master in masters(optimizer))
    for half, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert torch.equal(half, master.to(BF16))


def test_the_optimizer_may_be_gone() -> None:
    _, optimizer = trained(adamw)
    kept = masters(optimizer)
    del optimizer
    assert all(master.grad is not None and master.grad.dtype is torch.float32 for master in kept)


def test_gradients_of_foreign_optimizers_do_not_wait() -> None:
    for scale in (None, 8.0):
        model = network()
        optimizer = WholeAdamW(model.parameters(), lr=0.1)
        o2(model, optimizer, dtype=BF16, loss_scale=scale)
        backward(model, optimizer)
        assert not any(waiting(optimizer))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("with_handle", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [(BF16, 1.0), (FP16, 8.0)])
def test_fp16_optimizer(dtype: torch.dtype, scale: float, with_handle: bool) -> None:
    fused, parts = torch._fused_adamw_, []

    def watched(some: list[Tensor], *args: Any, **kwargs: Any) -> None:
        parts.append(len(some))
        fused(some, *args, **kwargs)

    adamw([torch.zeros(1)])
    stepping, ends = torch.optim.AdamW.step, []
    inner = _inner_cell(stepping).cell_contents
    with autoamp.region(device_type="cpu", dtype=dtype) if with_handle else contextlib.nullcontext():
        for make in (adamw, whole_adamw):
            parts.clear()
            model = network().to(dtype)
            optimizer = fp16_utils.FP16_Optimizer(make(model.parameters()), static_loss_scale=scale)
            for seed in range(3):
                optimizer.zero_grad()
                data = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
                optimizer.backward(model(data.to(dtype)).sum())
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(torch, "_fused_adamw_", watched)
                    optimizer.step()
            # Part by part, as within the cache.
            assert parts == ([1, 2, 1] * 3 if make is adamw else [4] * 3)
            ends.append(snapshot(model, optimizer))
    assert equal(*ends)
    assert torch.optim.AdamW.step is stepping
    assert _inner_cell(stepping).cell_contents is inner


@pytest.mark.parametrize("between", ["unfreeze", "replace", "join", "give", "half"])
def test_what_changes_between_a_block_and_the_step_is_seen(between: str) -> None:
    """The step looks again at little of what the block's end has looked at."""
    ends = []
    for make in (adamw, whole_adamw):
        model = network()
        model[0].bias.requires_grad_(between != "unfreeze")
        optimizer = make(model.parameters())
        extra = torch.nn.Linear(4, 2).to(BF16 if between == "half" else torch.float32)
        torch.nn.init.ones_(extra.weight)
        o2(model, optimizer, dtype=BF16, loss_scale=None)
        for seed in range(6):
            backward(model, optimizer, seed)
            if seed >= 4 and between == "unfreeze":
                model[0].bias.requires_grad_(True)
            elif seed == 4 and between == "replace":
                model[0].weight.grad = torch.full_like(model[0].weight, 0.5)
            elif seed == 4 and between == "give":
                masters(optimizer)[1].grad = torch.full_like(masters(optimizer)[1], 0.5)
            elif seed == 4 and between in ("join", "half"):
                optimizer.param_groups[0]["params"].append(extra.weight)
                extra.weight.grad = torch.full_like(extra.weight, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*snapshot(model, optimizer), extra.weight.detach().clone()])
    assert equal(*ends)
    assert len(ends[0]) == 4 + 4 + 12 + 1 + (4 if between in ("join", "half") else 0)


# -- gradients that wait with their scale --


def scaled(make: Callable[..., Any], dtype: torch.dtype = FP16, scale: Any = 8.0, **kwargs: Any) -> tuple[Any, Any]:
    model = network()
    optimizer = make(model.parameters(), **kwargs)
    o2(model, optimizer, dtype=dtype, loss_scale=scale)
    return model, optimizer


FUSED: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "FusedAdam": (optimizers.FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}),
    "FusedAdam, capturable": (optimizers.FusedAdam, {"capturable": True}),
    "FusedSGD": (optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.9, "set_grad_none": True}),
    "FusedLAMB": (optimizers.FusedLAMB, {"max_grad_norm": 0.1}),
    "FusedNovoGrad": (optimizers.FusedNovoGrad, {}),
    "FusedAdagrad": (optimizers.FusedAdagrad, {}),
}


def whole(kind: type[Any]) -> type[Any]:
    """Return a class that steps as another does, whose gradients are widened and unscaled at once."""
    return type(f"Whole{kind.__name__}", (kind,), {})


def half_and_not(make: Callable[..., Any]) -> tuple[torch.nn.Sequential, Any]:
    """Return a model at O2 with half parameters and fp32 ones, and its optimizer."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 3, 1), torch.nn.BatchNorm1d(3))
    optimizer = make(model.parameters())
    o2(model, optimizer)
    return model, optimizer


def whole_adamw(params: Any) -> Any:
    return WholeAdamW(params, lr=0.1, fused=True)


def concealed(model: torch.nn.Module) -> list[bool]:
    return [type(p.grad) is ScaledHalf for p in model.parameters()]


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_scaled_gradient_waits_until_somebody_looks(dtype: torch.dtype) -> None:
    model, optimizer = scaled(adamw, dtype)
    twin, other = scaled(whole_adamw, dtype)
    backward(model, optimizer)
    backward(twin, other)
    held = [p.grad for p in model.parameters()]
    assert all(waiting(optimizer))
    assert all(concealed(model))
    assert all(isinstance(grad, Tensor) for grad in held)
    assert held[2] is not None
    # One look at one is one for all, and whoever holds them has them too.
    assert held[2].dtype is torch.float32
    assert not any(waiting(optimizer))
    assert not any(concealed(model))
    for p, master, old, true in zip(model.parameters(), masters(optimizer), held, twin.parameters(), strict=True):
        assert type(p.grad) is Tensor
        assert p.grad is master.grad is old
        assert torch.equal(p.grad, true.grad)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("scale", [8.0, 1000.0, "dynamic"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (adamw, whole_adamw),
        (
            lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
            lambda params: WholeAdamW(params, lr=0.1, foreach=True),
        ),
        *((functools.partial(kind, **how), functools.partial(whole(kind), **how)) for kind, how in FUSED.values()),
    ],
    ids=["fused", "foreach", *FUSED],
)
def test_steps_have_the_bits_of_a_step_by_unscaled_gradients(one: Any, other: Any, scale: Any) -> None:
    if scale == 1000.0 and getattr(one, "func", None) is optimizers.FusedLAMB:
        pytest.skip("1 / 1000 is rounded, and the norm of all gradients is taken before it")
    ends = []
    for make in (one, other):
        model, optimizer = scaled(make, scale=scale)
        for seed in range(3):
            # The second overflows, and is skipped.
            backward(model, optimizer, seed, 1.0 if seed != 1 else 1e38)
            assert all(concealed(model)) is (make is one)
            optimizer.step()
            optimizer.zero_grad()
        for seed in (5, 6):
            # The last gradient adds to another, in fp32.
            backward(model, optimizer, seed)
        optimizer.step()
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
        ends.append([*snapshot(model, optimizer), *[p.grad for p in model.parameters()]])
    assert equal(*ends)


@pytest.mark.parametrize(
    "look",
    [
        lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda model, optimizer: torch.nn.utils.clip_grad_norm_(masters(optimizer), 0.01),
        lambda model, optimizer: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda model, optimizer: current_handle().clip_grad_norm_(optimizer, 0.01),  # type: ignore[union-attr]
        lambda model, optimizer: [p.grad.mul_(0.5) for p in model.parameters()],
        lambda model, optimizer: [p.grad.numpy().__imul__(0.5) for p in model.parameters()],
        lambda model, optimizer: loss_of(model, 3).backward(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: setattr(masters(optimizer)[1], "grad", None),
        lambda model, optimizer: setattr(next(model.parameters()), "grad", None),
        lambda model, optimizer: model.zero_grad(),
    ],
)
def test_whoever_comes_between_finds_true_gradients(look: Callable[[Any, Any], Any]) -> None:
    ends = []
    for make in (adamw, whole_adamw):
        model, optimizer = scaled(make)
        for seed in range(2):
            backward(model, optimizer, seed)
            look(model, optimizer)
            optimizer.step()
            ends.append([*snapshot(model, optimizer), *[p.grad for p in model.parameters()]])
            optimizer.zero_grad()
    assert equal(ends[0], ends[2])
    assert equal(ends[1], ends[3])


def test_copies_and_pickles_of_scaled_gradients_are_true() -> None:
    twin, other = scaled(whole_adamw)
    backward(twin, other)
    for copied in (copy.deepcopy, lambda grad: pickle.loads(pickle.dumps(grad)), lambda grad: grad.detach().clone()):
        model, optimizer = scaled(adamw)
        backward(model, optimizer)
        for p, true in zip(model.parameters(), twin.parameters(), strict=True):
            again = copied(p.grad)
            assert type(again) is Tensor
            assert torch.equal(again, true.grad)  # type: ignore[arg-type]
        model, optimizer = scaled(adamw)
        backward(model, optimizer)
        assert torch.equal(copied(masters(optimizer)[1]), masters(optimizer)[1])


def test_parameters_that_are_not_half_are_unscaled_at_once() -> None:
    ends = []
    for make in (adamw, whole_adamw):
        model, optimizer = half_and_not(make)
        for factor in (1.0, 1e38, 1.0):
            with autoamp.scale_loss(model(torch.randn(5, 4, 2)).square().sum() * factor, optimizer) as loss:
                loss.backward()
            assert [type(p.grad) is ScaledHalf for p in model.parameters()] == [make is adamw] * 2 + [False] * 2
            optimizer.step()
            optimizer.zero_grad()
        ends.append(snapshot(model, optimizer))
    assert equal(*ends)


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_take_scaled_gradients_beside_true_ones(name: str) -> None:
    kind, how = FUSED[name]
    ends = []
    for make in (kind, whole(kind)):
        model, optimizer = half_and_not(functools.partial(make, **how))
        for factor in (1.0, 1e38, 1.0):
            with autoamp.scale_loss(model(torch.randn(5, 4, 2)).square().sum() * factor, optimizer) as loss:
                loss.backward()
            assert [type(p.grad) is ScaledHalf for p in model.parameters()] == [make is kind] * 2 + [False] * 2
            optimizer.step()
            assert optimizer.half_factor is None
            optimizer.zero_grad()
        ends.append(snapshot(model, optimizer))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in zip(*ends, strict=True))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"])
def test_fused_optimizers_set_half_parameters_part_by_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copy_ = [], torch._foreach_copy_

    def watched(into: list[Tensor], *args: Any) -> None:
        copies.append([tensor.dtype for tensor in into])
        copy_(into, *args)

    model, optimizer = trained(functools.partial(getattr(optimizers, name), lr=0.1))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", watched)
        optimizer.step()
    for half, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert torch.equal(half, master.bfloat16())
    # Each part is widened, and copied down before the next.
    assert copies == [dtypes for size in (1, 2, 1) for dtypes in ([torch.float32] * size, [BF16] * size)]


def test_a_half_gradient_that_somebody_gave_is_not_unscaled_again() -> None:
    ends = []
    for make in (optimizers.FusedAdam, WholeAdam):
        model, optimizer = scaled(make)
        extra = torch.nn.Parameter(torch.ones(3))
        extra.grad_dtype = None
        optimizer.param_groups[0]["params"].append(extra)
        backward(model, optimizer)
        extra.grad = torch.full((3,), 0.5, dtype=FP16)
        optimizer.param_groups[0]["eps"] = 1.0
        optimizer.step()
        ends.append([*snapshot(model, optimizer), extra.detach().clone()])
    assert equal(*ends)


@pytest.mark.parametrize("odd", ["shared", "expanded"])
def test_odd_gradients_are_unscaled_at_once(odd: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(4)) for _ in range(2))
    optimizer = adamw(model.parameters())
    o2(model, optimizer)
    given = torch.full((4,), 16.0, dtype=FP16) if odd == "shared" else torch.full((1,), 16.0, dtype=FP16).expand(4)
    with autoamp.scale_loss(torch.zeros((), requires_grad=True), optimizer):
        model[0].grad = model[1].grad = given
    assert not any(concealed(model))
    assert all(torch.equal(p.grad, torch.full((4,), 2.0)) for p in model)


def test_an_exception_in_the_block_leaves_true_gradients() -> None:
    model, optimizer = scaled(adamw)
    with contextlib.suppress(ZeroDivisionError), autoamp.scale_loss(loss_of(model), optimizer) as loss:
        loss.backward()
        1 / 0  # noqa: B018
    twin, other = scaled(whole_adamw)
    backward(twin, other)
    assert not any(concealed(model))
    assert equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_another_thread_looks() -> None:
    model, optimizer = scaled(adamw)
    backward(model, optimizer)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(p.grad.sum() for p in model.parameters()))
    thread.start()
    thread.join()
    assert all(one.dtype is torch.float32 for one in found)
    assert not any(concealed(model))
    optimizer.step()


def test_a_compiled_function_sees_true_gradients() -> None:
    twin, other = scaled(whole_adamw)
    backward(twin, other)
    norm = torch.compile(lambda params: torch.stack([p.grad.norm() for p in params]).norm(), backend="eager")
    for look in (lambda model, _: list(model.parameters()), lambda _, optimizer: masters(optimizer)):
        model, optimizer = scaled(adamw)
        backward(model, optimizer)
        assert torch.equal(norm(look(model, optimizer)), norm(list(twin.parameters())))
        optimizer.step()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("beside", [False, True], ids=["halves alone", "an fp32 parameter beside"])
@pytest.mark.parametrize("scale", [lambda: 8.0, lambda: autoamp.DynamicLossScaler(8.0)], ids=["static", "dynamic"])
def test_fused_steps_unscale_themselves(monkeypatch: pytest.MonkeyPatch, scale: Any, beside: bool) -> None:
    """Each part's gradients are divided by torch's own kernel, unless some in the part have no scale."""
    fused, divided = torch._fused_adamw_, []

    def watched(some: Any, *args: Any, **kwargs: Any) -> None:
        divided.append(None if kwargs["grad_scale"] is None else float(kwargs["grad_scale"]))
        fused(some, *args, **kwargs)

    ends = []
    for make in (adamw, whole_adamw):
        model, optimizer = scaled(make, scale=scale())
        extra = torch.nn.Parameter(torch.ones(3))
        if beside:
            optimizer.param_groups[0]["params"].append(extra)
        for seed in range(3):
            extra.grad = torch.full((3,), 0.5)
            backward(model, optimizer, seed)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "_fused_adamw_", watched)
                optimizer.step()
            optimizer.zero_grad()
        assert not hasattr(optimizer, "grad_scale")
        ends.append((*snapshot(model, optimizer), extra.detach().clone()))
    assert equal(*ends)
    parts = len(divided) - 3
    assert parts > 3
    # The optimizer whose gradients were widened at once has none left to divide.
    assert divided[parts:] == [None] * 3
    assert divided[:parts].count(8.0) == (parts - 3 if beside else parts)


@pytest.mark.parametrize(
    ("name", "scale", "norm_type"),
    [
        *(("AdamW", scale, 2.0) for scale in (None, 8.0, 1000.0, "dynamic")),
        *((name, scale, 2.0) for name in ("FusedSGD", "FusedLAMB") for scale in (None, "dynamic")),
        *(("FusedSGD", scale, float("inf")) for scale in (None, "dynamic")),
    ],
)
def test_clipping_by_the_handle_leaves_gradients_half(name: str, scale: Any, norm_type: float) -> None:
    """Whoever looks afterwards finds them clipped, in fp32, and the step takes them so."""
    kind, how = {"AdamW": (torch.optim.AdamW, {"fused": True}), **FUSED}[name]
    ends, norms = [], []
    for make in (kind, whole(kind)):
        model, optimizer = scaled(make, BF16 if scale is None else FP16, scale, **how)
        for seed in range(4):
            backward(model, optimizer, seed, 1e38 if seed == 1 and scale else 1.0)
            norm = current_handle().clip_grad_norm_(optimizer, 0.01, norm_type)  # type: ignore[union-attr]
            assert concealed(model) == [make is kind] * 4
            optimizer.step()
            assert concealed(model) == [make is kind] * 4
            norms.append(norm.nan_to_num(7.0, 7.0))
            if seed < 3:
                optimizer.zero_grad()
        # The last ones were clipped, and add to the next in fp32.
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())  # type: ignore[union-attr]
        ends.append([*snapshot(model, optimizer), *[p.grad.clone() for p in model.parameters()]])  # type: ignore[union-attr]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*ends, strict=True))
    assert torch.allclose(torch.stack(norms[:4]), torch.stack(norms[4:]))
    assert float(norms[0]) > 0.01
    assert float(torch.nn.utils.get_total_norm(ends[0][-4:], norm_type)) == pytest.approx(0.01, rel=1e-3)


def test_clipping_twice_and_what_comes_after() -> None:
    ends = []
    for make in (adamw, whole_adamw):
        model, optimizer = scaled(make)
        handle: Any = current_handle()
        backward(model, optimizer)
        norms = [handle.clip_grad_norm_(optimizer, limit) for limit in (0.02, 0.01, 5.0)]
        assert [float(norm) for norm in norms[1:]] == pytest.approx([0.02, 0.01], rel=1e-3)
        # Another backward pass adds to the clipped ones, and a 3-norm is taken of wide ones.
        backward(model, optimizer, 1)
        assert not any(concealed(model))
        handle.clip_grad_norm_(optimizer, 0.01, 3.0)
        optimizer.step()
        ends.append([*snapshot(model, optimizer), *[p.grad for p in model.parameters()]])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*ends, strict=True))


def test_clipping_takes_true_gradients_into_account() -> None:
    ends = []
    for make in (adamw, whole_adamw):
        model, optimizer = half_and_not(make)
        for norm_type in (2.0, float("inf")):
            with autoamp.scale_loss(model(torch.randn(5, 4, 2)).square().sum(), optimizer) as loss:
                loss.backward()
            norm = current_handle().clip_grad_norm_(optimizer, 0.1, norm_type)  # type: ignore[union-attr]
            optimizer.step()
            ends.append([norm, *snapshot(model, optimizer), *[p.grad.clone() for p in model.parameters()]])  # type: ignore[union-attr]
            optimizer.zero_grad()
    for one, other in zip(ends[:2], ends[2:], strict=True):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(one, other, strict=True))


def test_scaled_gradients_without_their_optimizer() -> None:
    model, optimizer = scaled(adamw)
    backward(model, optimizer)
    grad = next(model.parameters()).grad
    kept = masters(optimizer)
    twin, other = scaled(whole_adamw)
    backward(twin, other)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    # It was cleared, and somebody holds it.
    assert torch.equal(grad, next(twin.parameters()).grad)  # type: ignore[arg-type]
    assert all(master.grad is None for master in kept)


def test_hooks_of_parameters_see_what_backward_made() -> None:
    model, optimizer = scaled(adamw)
    seen: list[torch.dtype] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    backward(model, optimizer)
    assert seen == [FP16] * 4
    backward(model, optimizer)
    assert seen[4:] == [torch.float32] * 4
