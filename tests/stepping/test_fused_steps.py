"""Steps by compiled kernels: as those of torch within rounding, in torch's own state, and with torch's for the rest."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import fp16_utils, kernels, optimizers
from autoamp.runtime import current_handle
from autoamp.stepping import fused_steps, master_of
from autoamp.stepping.half_gradients import ScaledHalf
from tests.stepping.networks import backward, data, equal, masters, network, o2, snapshot

autoamp_kernels = pytest.importorskip("autoamp_kernels")

BF16, FP16 = torch.bfloat16, torch.float16

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW(fused)": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False),
    "Adam(amsgrad)": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1, maximize=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.01),
    "SGD(nesterov)": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.01, weight_decay=0.1),
    "FusedAdam": functools.partial(optimizers.FusedAdam, lr=0.01, weight_decay=0.1),
    "FusedAdam(capturable)": functools.partial(optimizers.FusedAdam, lr=0.01, capturable=True, adam_w_mode=False),
    "FusedSGD": functools.partial(optimizers.FusedSGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "FusedLAMB": functools.partial(optimizers.FusedLAMB, lr=0.01, max_grad_norm=0.1),
    "FusedNovoGrad": functools.partial(optimizers.FusedNovoGrad, lr=0.01, weight_decay=0.1),
    "FusedNovoGrad(inside)": functools.partial(optimizers.FusedNovoGrad, lr=0.01, norm_type=0, reg_inside_moment=True),
    "FusedAdagrad": functools.partial(optimizers.FusedAdagrad, lr=0.01, weight_decay=0.1),
}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int], bool]]:
    """Each kernel's call that was taken: its name, the sizes of parameters, and whether it wrote halves."""
    calls: list[tuple[str, list[int], bool]] = []
    attempt = kernels.attempt

    def watched(kernel: Any, params: list[Tensor], *args: Any, **kwargs: Any) -> bool:
        taken = attempt(kernel, params, *args, **kwargs)
        # Gradients are looked through by a kernel too, at another place.
        if taken and kernel.__name__ != "scale_":
            calls.append((kernel.__name__, [param.numel() for param in params], bool(kwargs.get("halves"))))
        return taken

    monkeypatch.setattr(kernels, "attempt", watched)
    return calls


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    opened = kernels.opened

    def close(yes: bool) -> None:
        monkeypatch.setattr(kernels, "opened", (lambda _: None) if yes else opened)

    return close


def set_up(make: Callable[[Any], Any], dtype: torch.dtype = BF16, **kwargs: Any) -> tuple[Any, Any]:
    model = network()
    optimizer = make(model.parameters())
    o2(model, optimizer, **{"dtype": dtype, "loss_scale": None if dtype is BF16 else 8.0, **kwargs})
    return model, optimizer


def train(model: Any, optimizer: Any, seeds: Any) -> None:
    for seed in seeds:
        backward(model, optimizer, seed)
        optimizer.step()
        optimizer.zero_grad()


def close_to(one: list[Tensor], other: list[Tensor]) -> bool:
    # fp32 within its rounding; a half may be the next one to a master that is.
    return len(one) == len(other) and all(
        torch.allclose(a, b, rtol=2e-5, atol=1e-6) if a.dtype is torch.float32 else torch.allclose(a, b, rtol=2e-2)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, dtype: torch.dtype, called: Any, closed: Any) -> None:
    ends, dicts = [], []
    for off in (False, True):
        closed(off)
        before = len(called)
        model, optimizer = set_up(OPTIMIZERS[name], dtype)
        train(model, optimizer, range(5))
        ends.append(snapshot(model, optimizer))
        dicts.append(optimizer.state_dict())
        # The first step of some is torch's, since it makes the state.
        sizes = [32, 8, 16, 2]
        assert called[before:] == [(called[-1][0], sizes, True)] * (0 if off else len(called) - before)
        assert (len(called) - before in (4, 5)) is not off
        assert all(torch.equal(half, master_of(half).to(dtype)) for half in model.parameters())
    assert close_to(*ends)
    one, other = dicts
    assert one["param_groups"] == other["param_groups"]
    for key, state in one["state"].items():
        assert state.keys() == other["state"][key].keys()
        for entry, value in state.items():
            if isinstance(value, Tensor):
                twin = other["state"][key][entry]
                assert (value.dtype, value.shape, value.stride()) == (twin.dtype, twin.shape, twin.stride())


@pytest.mark.parametrize("name", ["AdamW(fused)", "SGD(nesterov)", "FusedAdam"])
def test_either_way_goes_on_from_the_other(name: str, closed: Any) -> None:
    ends = []
    for ways in ((False, True, False), (True, True, True)):
        model, optimizer = set_up(OPTIMIZERS[name])
        for place, off in enumerate(ways):
            closed(off)
            train(model, optimizer, range(2 * place, 2 * place + 2))
            optimizer.load_state_dict(optimizer.state_dict())
        ends.append(snapshot(model, optimizer))
    assert close_to(*ends)


def test_what_has_no_state_yet_is_stepped_by_torch(called: Any, closed: Any) -> None:
    ends = []
    for off in (False, True):
        closed(off)
        model, optimizer = set_up(OPTIMIZERS["AdamW(fused)"])
        model[0].weight.requires_grad_(False)
        train(model, optimizer, range(2))
        model[0].weight.requires_grad_(True)
        train(model, optimizer, range(2, 5))
        ends.append(snapshot(model, optimizer))
    assert close_to(*ends)
    assert [sizes for _, sizes, _ in called] == [[8, 16, 2], [8, 16, 2], [32, 8, 16, 2], [32, 8, 16, 2]]
    assert [float(state["step"]) for state in optimizer.state.values()].count(3.0) == 1


def _state(optimizer: Any) -> Any:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


def _replace(model: Any, optimizer: Any) -> None:
    state = _state(optimizer)
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"]), state["exp_avg_sq"].clone()


def _move(model: Any, optimizer: Any) -> None:
    _state(optimizer)["exp_avg"].data = torch.ones_like(_state(optimizer)["exp_avg"])


def _move_master(model: Any, optimizer: Any) -> None:
    master = optimizer.param_groups[0]["params"][1]
    master.data = master.data.clone() + 1.0


def _reorder(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def _split(model: Any, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    optimizer.param_groups.append({**group, "params": group["params"][2:], "lr": 0.5})
    del group["params"][2:]


def _options(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0].update(lr=0.2, weight_decay=0.3, betas=(0.5, 0.6), maximize=True)


def _load(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _freeze(model: Any, optimizer: Any) -> None:
    model[0].bias.requires_grad_(False)


@pytest.mark.parametrize("change", [_replace, _move, _move_master, _reorder, _split, _options, _load, _freeze])
def test_what_changed_since_the_last_step_is_noticed(change: Any, called: Any, closed: Any) -> None:
    ends = []
    for off in (False, True):
        closed(off)
        model, optimizer = set_up(OPTIMIZERS["AdamW(fused)"])
        train(model, optimizer, range(3))
        called.clear()
        change(model, optimizer)
        train(model, optimizer, range(3, 6))
        ends.append(snapshot(model, optimizer))
        stepped = {
            _reorder: [[2, 16, 8, 32]] * 3,
            _split: [[32, 8], [16, 2]] * 3,
            _freeze: [[32, 16, 2]] * 3,
        }.get(change, [[32, 8, 16, 2]] * 3)
        assert [sizes for _, sizes, _ in called] == ([] if off else stepped)
    assert close_to(*ends)


def _shares_memory(half: Any) -> None:
    half.grad = half.detach().view_as(half)


def _has_gaps(half: Any) -> None:
    half.grad = torch.ones(8, 8, dtype=BF16)[:, ::2]


def _is_turned(half: Any) -> None:
    half.grad = torch.arange(32.0).to(BF16).view(4, 8).t()


def _is_missing(half: Any) -> None:
    half.grad = None


@pytest.mark.parametrize(("change", "sizes"), [
    (_shares_memory, []), (_has_gaps, []), (_is_turned, []), (_is_missing, [[8, 16, 2]]),
])  # fmt: skip
def test_gradients_that_are_not_like_the_last_ones(change: Any, sizes: Any, called: Any, closed: Any) -> None:
    ends = []
    for off in (False, True):
        closed(off)
        model, optimizer = set_up(OPTIMIZERS["AdamW(fused)"])
        train(model, optimizer, range(4))
        called.clear()
        backward(model, optimizer, 4)
        change(model[0].weight)
        optimizer.step()
        optimizer.zero_grad()
        assert off or [stepped for _, stepped, _ in called] == sizes
        train(model, optimizer, range(5, 7))
        ends.append(snapshot(model, optimizer))
    assert close_to(*ends)


def test_a_group_of_several_kinds_is_sorted(called: Any, closed: Any) -> None:
    ends = []
    for off in (False, True):
        closed(off)
        model, optimizer = set_up(OPTIMIZERS["SGD(nesterov)"])
        train(model, optimizer, range(3))
        called.clear()
        backward(model, optimizer, 3)
        # A gradient of one's own; the others wait.
        masters(optimizer)[1].grad = torch.full((8,), 0.25)
        optimizer.step()
        ends.append(snapshot(model, optimizer))
        assert sorted(sizes for _, sizes, _ in called) == ([] if off else [[8], [32, 16, 2]])
    assert close_to(*ends)


def test_a_gradient_that_a_hook_gives_is_the_masters(called: Any, closed: Any) -> None:
    ends = []
    for off in (False, True):
        closed(off)
        model, optimizer = set_up(OPTIMIZERS["AdamW(fused)"])
        train(model, optimizer, range(3))
        called.clear()

        def give(optimizer: Any, *_: Any) -> None:
            masters(optimizer)[1].grad = torch.full((8,), 0.25)

        optimizer.register_step_pre_hook(give)
        train(model, optimizer, range(3, 5))
        ends.append(snapshot(model, optimizer))
        assert sorted(sizes for _, sizes, _ in called) == ([] if off else [[8], [8], [32, 16, 2], [32, 16, 2]])
    assert close_to(*ends)


def test_a_scale_is_taken_from_gradients_that_wait_alone(called: Any, closed: Any) -> None:
    ends = []
    for off in (False, True):
        closed(off)
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = OPTIMIZERS["SGD(nesterov)"](model.parameters())
        o2(model, optimizer, dtype=FP16, loss_scale=8.0)
        train(model, optimizer, range(4))
        ends.append(snapshot(model, optimizer))
    assert sorted(sizes for _, sizes, _ in called) == [[8, 8]] * 3 + [[32, 8, 16, 2]] * 3
    assert close_to(*ends)


def test_fp32_parameters_and_gradients_that_were_looked_at(called: Any) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = OPTIMIZERS["AdamW(fused)"](model.parameters())
    o2(model, optimizer, dtype=BF16, loss_scale=None)
    train(model, optimizer, range(2))
    assert sorted((sizes, halves) for _, sizes, halves in called) == [([8, 8], False), ([32, 8, 16, 2], True)]
    called.clear()
    backward(model, optimizer)
    torch.nn.utils.clip_grad_norm_(masters(optimizer), 0.1)
    before = snapshot(model, optimizer)
    optimizer.step()
    assert sorted((sizes, halves) for _, sizes, halves in called) == [([8, 8], False), ([32, 8, 16, 2], True)]
    assert not equal(before, snapshot(model, optimizer))


@pytest.mark.parametrize("scale", [1000.0, lambda: autoamp.DynamicLossScaler(8.0)], ids=["1000", "dynamic"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.startswith("Fused")])
def test_fused_optimizers_read_scaled_gradients(name: str, scale: Any, called: Any, closed: Any) -> None:
    ends = []
    for off in (False, True):
        closed(off)
        model, optimizer = set_up(OPTIMIZERS[name], FP16, loss_scale=scale() if callable(scale) else scale)
        for seed in range(4):
            backward(model, optimizer, seed)
            kept = [p.grad for p in model.parameters()]
            assert [type(grad) for grad in kept] == [ScaledHalf] * 4
            optimizer.step()
            # They wait on with their scale, and nothing has written to them.
            assert [type(grad) for grad in kept] == [ScaledHalf] * 4
            if seed < 3:
                optimizer.zero_grad(set_to_none=True)
        ends.append([*snapshot(model, optimizer), *[p.grad.clone() for p in model.parameters()]])
    assert close_to(*ends)
    assert called
    assert all(halves for _, _, halves in called)


@pytest.mark.parametrize("name", ["AdamW(fused)", "FusedAdam(capturable)", "FusedLAMB"])
def test_clipping_reads_gradients_once(name: str, closed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read looks for inf and nan and takes the norm, from the second block with clipping on; the step clips."""
    ends, reads = [], []
    attempt = kernels.attempt

    def watched(kernel: Any, *args: Any, **kwargs: Any) -> bool:
        if kernel.__name__ == "scale_":
            reads.append(sorted(key for key in ("found_inf", "total") if kwargs.get(key) is not None))
        return attempt(kernel, *args, **kwargs)

    monkeypatch.setattr(kernels, "attempt", watched)
    for off in (False, True):
        closed(off)
        model, optimizer = set_up(OPTIMIZERS[name], FP16, loss_scale="dynamic")
        for seed in range(4):
            reads.clear()
            backward(model, optimizer, seed, float("inf") if seed == 2 else 1.0)
            norm = current_handle().clip_grad_norm_(optimizer, 0.01)  # type: ignore[union-attr]
            if not off:
                assert reads == ([["found_inf", "total"]] if seed else [["found_inf"], ["total"]])
            ends.append([norm.nan_to_num(7.0, 7.0)])
            optimizer.step()
            optimizer.zero_grad()
        ends.append(snapshot(model, optimizer))
    one, other = ends[: len(ends) // 2], ends[len(ends) // 2 :]
    assert all(close_to(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_an_overflow_changes_nothing(name: str) -> None:
    model, optimizer = set_up(OPTIMIZERS[name], FP16, loss_scale="dynamic")
    train(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    backward(model, optimizer, factor=float("inf"))
    optimizer.step()
    assert equal(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    assert not equal(before, snapshot(model, optimizer))


def test_what_kernels_do_not_take_goes_torchs_way(called: Any) -> None:
    class Own(torch.optim.AdamW):
        """Another class."""

    for make in (
        functools.partial(Own, lr=0.01),
        functools.partial(torch.optim.RMSprop, lr=0.01),
        functools.partial(torch.optim.Adagrad, lr=0.01, lr_decay=0.1),
    ):
        model, optimizer = set_up(make)
        before = snapshot(model, optimizer)
        train(model, optimizer, range(2))
        assert not equal(before[:4], snapshot(model, optimizer)[:4])
    assert called == []


def test_halves_that_share_memory_are_stepped_by_torch(called: Any, closed: Any) -> None:
    ends = []
    for off in (False, True):
        closed(off)
        model, optimizer = set_up(OPTIMIZERS["AdamW(fused)"])
        flat = torch.cat([half.detach().reshape(-1) for half in model.parameters()])
        pieces = flat.split([half.numel() for half in model.parameters()])
        for half, piece in zip(model.parameters(), pieces, strict=True):
            half.data = piece.view_as(half)
        # An overlap of two halves, which no kernel may write to.
        model[2].bias.data = flat[-3:-1]
        train(model, optimizer, range(3))
        ends.append([master.clone() for master in masters(optimizer)])
    assert called == []
    assert close_to(*ends)


def test_writes_into_halves_still_reach_masters() -> None:
    model, optimizer = set_up(OPTIMIZERS["AdamW(fused)"])
    train(model, optimizer, range(3))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    backward(model, optimizer)
    optimizer.step()
    assert float((masters(optimizer)[0].detach() - 0.5).abs().max()) < 0.05


def test_hooks_of_the_optimizer_run_once(called: Any) -> None:
    model, optimizer = set_up(OPTIMIZERS["AdamW(fused)"])
    train(model, optimizer, range(1))
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, range(1))
    assert seen == ["before", "after"]
    assert len(called) == 1


def test_no_class_is_known_but_torchs_own() -> None:
    optimizer = optimizers.FusedAdam(network().parameters())
    assert fused_steps.step_by_kernels(optimizer, {}) == ([], True)
    assert autoamp.kernels.opened("cpu") is not None


def test_a_momentum_that_is_none_is_made_by_torch(called: Any, closed: Any) -> None:
    ends = []
    for off in (False, True):
        closed(off)
        model, optimizer = set_up(OPTIMIZERS["SGD(nesterov)"])
        train(model, optimizer, range(2))
        called.clear()
        _state(optimizer)["momentum_buffer"] = None
        train(model, optimizer, range(2, 4))
        ends.append(snapshot(model, optimizer))
        assert [sizes for _, sizes, _ in called] == ([] if off else [[8, 16, 2], [32, 8, 16, 2]])
    assert close_to(*ends)


def test_what_was_refused_is_not_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = set_up(OPTIMIZERS["AdamW(fused)"])
    train(model, optimizer, range(2))
    offered: list[int] = []

    def refuse(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        offered.append(len(params))
        raise autoamp_kernels.ArgumentError("no")

    monkeypatch.setattr(autoamp_kernels, "adam_", refuse)
    before = snapshot(model, optimizer)
    train(model, optimizer, range(2, 3))
    assert offered == [4]
    assert not equal(before, snapshot(model, optimizer))


def test_parameters_of_other_classes_are_left() -> None:
    class Own(nn.Parameter):
        """Its operators may be others."""

    params = [nn.Parameter(torch.ones(4)), Own(torch.ones(4))]
    for param in params:
        param.grad = torch.ones(4)
    stepped, left = fused_steps.step_by_kernels(torch.optim.SGD(params, lr=1.0), {})
    assert [id(param) for param in stepped] == [id(params[0])]
    assert left
    assert [float(param.sum()) for param in params] == [0.0, 4.0]


def test_half_parameters_without_masters_are_left() -> None:
    param = nn.Parameter(torch.ones(4, dtype=BF16))
    param.grad = torch.ones(4, dtype=BF16)
    assert fused_steps.step_by_kernels(torch.optim.SGD([param], lr=1.0), {}) == ([], True)
    assert torch.equal(param, torch.ones(4, dtype=BF16))


@pytest.mark.parametrize("with_handle", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [(BF16, 1.0), (FP16, 8.0)])
@pytest.mark.parametrize("name", ["AdamW(fused)", "SGD(nesterov)", "FusedAdam", "FusedLAMB"])
def test_fp16_optimizer(
    name: str, dtype: torch.dtype, scale: float, with_handle: bool, called: Any, closed: Any
) -> None:
    ends = []
    with autoamp.region(device_type="cpu", dtype=dtype) if with_handle else contextlib.nullcontext():
        for off in (False, True):
            closed(off)
            before = len(called)
            model = network().to(dtype)
            optimizer = fp16_utils.FP16_Optimizer(OPTIMIZERS[name](model.parameters()), static_loss_scale=scale)
            for seed in range(4):
                optimizer.zero_grad()
                optimizer.backward(_loss(model, seed))
                optimizer.step()
            assert (len(called) - before in (3, 4)) is not off
            assert all(halves for _, _, halves in called[before:])
            ends.append(snapshot(model, optimizer))
    assert close_to(*ends)


def _loss(model: Any, seed: int) -> Tensor:
    inputs, targets = data(seed)
    half = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(inputs.to(half)).float(), targets)
