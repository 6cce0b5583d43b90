"""FP16_Optimizer: an optimizer in every respect, stepping fp32 masters, with the loss scaling built in."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import autoamp
from autoamp.apex.fp16_utils import FP16_Optimizer
from autoamp.apex.optimizers import FusedAdam
from autoamp.core import runtime_of
from autoamp.errors import CheckpointError, UsageError

LISTS = {"extends": [], "fp16": ["linear"], "fp32": ["mse_loss"]}

LOW = {"init_scale": 2.0**10}


def network(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def build(model: nn.Module, make: Any = torch.optim.SGD, lr: float = 0.1, **kwargs: Any) -> FP16_Optimizer:
    return FP16_Optimizer(make(model.parameters(), lr=lr), **kwargs)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)
    return mse_loss(model(inputs.to(model[0].weight.dtype)).float(), targets)  # type: ignore[index]


def train(model: nn.Module, optimizer: FP16_Optimizer, steps: int = 4, factor: float = 1.0) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step % 2) * factor
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def masters(optimizer: FP16_Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def snapshot(model: nn.Module, optimizer: FP16_Optimizer) -> list[Tensor]:
    state = [v.clone() for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *masters(optimizer))] + state


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -- training --


def test_it_trains_like_fp32(half: torch.dtype) -> None:
    model, reference = network(half), network(torch.float32)
    optimizer, plain = build(model, torch.optim.Adam, 0.02), torch.optim.Adam(reference.parameters(), lr=0.02)
    train(model, optimizer, 20)
    for step in range(20):
        plain.zero_grad()
        loss_of(reference, step % 2).backward()
        plain.step()
    for master, parameter in zip(masters(optimizer), reference.parameters(), strict=True):
        assert master.dtype is torch.float32
        torch.testing.assert_close(master.detach(), parameter.detach(), atol=0.06, rtol=0.1)
    for parameter, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert torch.equal(parameter, master.to(half))


def test_built_before_or_after_half() -> None:
    def run(before: bool) -> list[Tensor]:
        model = network(torch.float32)
        if before:
            optimizer = build(model, torch.optim.Adam)
            model.half()
        else:
            model.half()
            optimizer = build(model, torch.optim.Adam)
        train(model, optimizer)
        return snapshot(model, optimizer)

    assert equal(run(True), run(False))


@pytest.mark.parametrize(
    ("kwargs", "scale"),
    [
        ({}, 1.0),
        ({"static_loss_scale": 128.0}, 128.0),
        ({"static_loss_scale": None}, 1.0),
        ({"dynamic_loss_scale": True}, 2.0**16),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2**10}}, 2.0**10),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2**32}}, 2.0**32),
        ({"static_loss_scale": None, "dynamic_loss_scale": True, "dynamic_loss_args": None}, 2.0**16),
    ],
)
def test_loss_scales(kwargs: dict[str, Any], scale: float) -> None:
    optimizer = build(network(), **kwargs)
    assert optimizer.loss_scale == scale
    assert f"loss_scale={scale:g}" in repr(optimizer)


def test_arguments_of_the_dynamic_scale() -> None:
    arguments = {"init_scale": 64.0, "scale_factor": 4.0, "scale_window": 2}
    optimizer = build(model := network(), dynamic_loss_scale=True, dynamic_loss_args=arguments)
    train(model, optimizer, 2)
    assert optimizer.loss_scale == 256.0
    train(model, optimizer, 1, factor=torch.inf)
    assert optimizer.loss_scale == 64.0
    assert arguments == {"init_scale": 64.0, "scale_factor": 4.0, "scale_window": 2}
    with pytest.raises(UsageError, match="dynamic_loss_args has no 'window'; choose among init_scale, scale_factor"):
        build(model, dynamic_loss_scale=True, dynamic_loss_args={"window": 3})


def test_overflow_skips_and_changes_no_bit() -> None:
    model = network()
    optimizer = build(model, torch.optim.Adam, dynamic_loss_scale=True, dynamic_loss_args=LOW)
    train(model, optimizer)
    assert optimizer.overflow is False
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model) * torch.inf)
    assert optimizer.overflow is True
    assert optimizer.clip_master_grads(1.0) == -1.0
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert optimizer.overflow is True
    assert optimizer.loss_scale == 2.0**9
    assert equal(snapshot(model, optimizer), before)
    train(model, optimizer, 1)
    assert optimizer.overflow is False


def test_gradients_have_their_true_values() -> None:
    model = network()
    optimizer = build(model, static_loss_scale=256.0)
    optimizer.backward(loss_of(model))
    reference = network(torch.float32)
    loss_of(reference).backward()
    got = optimizer.inspect_master_grad_data()
    assert got is not None
    for grad, parameter in zip(got[0], reference.parameters(), strict=True):
        assert grad.dtype is torch.float32  # type: ignore[union-attr]
        torch.testing.assert_close(grad, parameter.grad, atol=0.01, rtol=0.02)
    norm = torch.cat([g.flatten() for g in got[0]]).norm().item()  # type: ignore[union-attr]
    torch.testing.assert_close(optimizer.clip_master_grads(norm / 4), norm)
    clipped = torch.cat([p.grad.flatten() for p in masters(optimizer)]).norm().item()
    torch.testing.assert_close(clipped, norm / 4, atol=1e-4, rtol=1e-4)
    assert optimizer.clip_master_grads(10.0, norm_type=torch.inf) == max(p.grad.abs().max() for p in masters(optimizer))


def test_gradients_whose_norm_is_too_large_for_fp32_are_clipped_to_zero() -> None:
    model = nn.Linear(2, 2)
    optimizer = build(model)
    before = snapshot(model, optimizer)
    optimizer.backward(model(torch.ones(1, 2)).sum() * 1e25)
    assert optimizer.clip_master_grads(1.0) == torch.inf
    optimizer.step()
    assert equal(snapshot(model, optimizer), before)


@pytest.mark.parametrize("call", [True, False], ids=["update_master_grads()", "step()"])
def test_backward_passes_that_add_up(call: bool) -> None:
    def run(update: bool) -> list[Tensor]:
        model = network()
        optimizer = build(model, static_loss_scale=64.0)
        optimizer.zero_grad()
        for seed in range(3):
            optimizer.backward(loss_of(model, seed), update_master_grads=update)
        if call:
            optimizer.update_master_grads()
        given = [p.grad.clone() for p in masters(optimizer)]
        optimizer.step()
        return [*given, *snapshot(model, optimizer)] if call else snapshot(model, optimizer)

    for one, other in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


def test_retain_graph() -> None:
    model = network()
    optimizer = build(model)
    loss = loss_of(model)
    optimizer.backward(loss, retain_graph=True)
    once = masters(optimizer)[0].grad.clone()
    optimizer.backward(loss)
    torch.testing.assert_close(masters(optimizer)[0].grad, once * 2)


@pytest.mark.parametrize("arguments", [((), {}), ((False,), {}), ((), {"set_grads_to_None": True})])
def test_zero_grad(arguments: Any) -> None:
    model = network()
    optimizer = build(model)
    optimizer.backward(loss_of(model))
    args, kwargs = arguments
    optimizer.zero_grad(*args, **kwargs)
    for tensor in (*model.parameters(), *masters(optimizer)):
        assert tensor.grad is None or not tensor.grad.any()
        assert (tensor.grad is None) is (not args)
    model.zero_grad()
    optimizer.optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    fresh = network()
    other = build(fresh)
    other.backward(loss_of(fresh))
    assert equal([p.grad for p in masters(optimizer)], [p.grad for p in masters(other)])  # type: ignore[misc]


# -- a real optimizer --


def test_is_an_optimizer() -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = FP16_Optimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state == inner.state
    assert optimizer.defaults["lr"] == 0.1
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, 1)
    assert calls == ["pre", "post"]


@pytest.mark.parametrize("first", [1.0, torch.inf], ids=["", "first step skipped"])
def test_learning_rate_scheduler(first: float) -> None:
    model = network()
    optimizer = build(model, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), dynamic_loss_scale=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
        rates = [optimizer.param_groups[0]["lr"]]
        for factor in (first, 1.0):
            train(model, optimizer, 1, factor)
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) == 3
    assert rates[-1] == scheduler.get_last_lr()[0]


@pytest.mark.parametrize("kwargs", [{}, {"static_loss_scale": 64.0}, {"dynamic_loss_scale": True}])
@pytest.mark.parametrize("active", [False, True], ids=["alone", "beside init()"])
def test_lbfgs_closures(kwargs: dict[str, Any], active: bool) -> None:
    if active:
        autoamp.init(lists=LISTS, dtype=torch.float16, device_type="cpu")
    model = network(torch.bfloat16)
    make = lambda p, lr: torch.optim.LBFGS(p, lr=lr, max_iter=5, line_search_fn="strong_wolfe")  # noqa: E731
    optimizer = build(model, make, 1.0, **kwargs)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        return loss

    first = closure().item()
    for _ in range(5):
        optimizer.step(closure)
    assert loss_of(model).item() < first / 4
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(model.parameters(), masters(optimizer), strict=True))


def test_a_closure_that_overflows_is_asked_again_at_a_lower_scale() -> None:
    model = network()
    optimizer = build(model, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**30})
    calls = []

    def closure() -> Tensor:
        calls.append(optimizer.loss_scale)
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        return loss

    before = snapshot(model, optimizer)
    loss = optimizer.step(closure)
    assert loss.item() > 0
    assert calls[0] == 2.0**30
    assert calls == sorted(calls, reverse=True)
    assert len(calls) > 2
    assert not equal(snapshot(model, optimizer), before)
    assert optimizer.overflow is False


def test_groups_that_are_added_and_mixed_dtypes() -> None:
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.Linear(4, 2))
    optimizer = FP16_Optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    assert len(optimizer.param_groups) == 2
    assert masters(optimizer)[2] is model[1].weight
    more = nn.Linear(2, 2).half()
    optimizer.add_param_group({"params": list(more.parameters())})
    assert masters(optimizer)[4].dtype is torch.float32
    optimizer.zero_grad()
    before = [p.detach().clone() for p in masters(optimizer)]
    optimizer.backward(more(model[1](model[0](torch.ones(3, 4).half()).float()).half()).sum())
    optimizer.step()
    assert not any(map(torch.equal, masters(optimizer), before))
    assert torch.equal(more.weight, masters(optimizer)[4].half())


@pytest.mark.parametrize("first", ["optimizer", "half"])
def test_state_is_found_by_the_models_weights(first: str) -> None:
    """As pruning by momentum asks for it, whenever the model went to half precision."""
    model = network()
    if first == "half":
        model.half()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = FP16_Optimizer(inner, static_loss_scale=8.0)
    model.half()
    for weight in model.parameters():
        assert "momentum_buffer" not in optimizer.state[weight]
    optimizer.backward(model(torch.ones(2, 4).half()).float().sum())
    optimizer.step()
    for weight, master in zip(model.parameters(), inner.param_groups[0]["params"], strict=True):
        buffer = optimizer.state[weight]["momentum_buffer"]
        assert buffer is inner.state[master]["momentum_buffer"]
        assert buffer.shape == weight.shape
        assert weight in optimizer.state
        buffer.zero_()
    assert len(optimizer.state) == len(inner.state) == len(list(model.parameters()))
    assert {id(key) for key in optimizer.state} == {id(p) for p in inner.param_groups[0]["params"]}
    with pytest.raises(KeyError):
        del optimizer.state[torch.ones(1)]


def test_wrong_inner_optimizers() -> None:
    optimizer = build(network())
    with pytest.raises(UsageError, match="init_optimizer is an FP16_Optimizer already"):
        FP16_Optimizer(optimizer)
    with pytest.raises(UsageError, match="init_optimizer takes an optimizer, not a list"):
        FP16_Optimizer([])


def test_copies_and_pickles_are_refused_with_a_remedy() -> None:
    model = network()
    optimizer = build(model)
    for call in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(UsageError, match="copy or save its state_dict"):
            call(optimizer)
    train(model, optimizer, 1)


def test_beside_an_active_handle() -> None:
    """Casts are off in the step and on in the closure, and the handle counts the steps and the skips."""

    def run() -> list[Tensor]:
        model = network()
        optimizer = build(model, dynamic_loss_scale=True)
        train(model, optimizer)
        return snapshot(model, optimizer)

    alone = run()
    handle = autoamp.init(lists=LISTS, dtype=torch.float16, device_type="cpu")
    assert equal(run(), alone)
    stats = handle.stats
    assert handle.skipped_steps == stats["skipped"] == sum(stats["found_inf"]) < stats["steps"]


def test_another_scale_is_refused() -> None:
    model = network()
    optimizer = build(model)
    handle = autoamp.init(lists=LISTS, dtype=torch.float16, device_type="cpu")
    with pytest.raises(UsageError, match=r"scales its loss itself: call optimizer.backward\(loss\)"):
        handle.scale_loss(loss_of(model), optimizer).__enter__()
    train(model, optimizer, 1)


def test_fp32_parameters_need_no_masters() -> None:
    model = network(torch.float32)
    optimizer = build(model, static_loss_scale=8.0)
    assert masters(optimizer) == list(model.parameters())
    losses = train(model, optimizer, 6)
    assert losses[-2] < losses[0]
    assert optimizer.state_dict()["fp32_from_fp16"] == [[]]


def test_nothing_is_kept_alive(collected: Any) -> None:
    def run() -> list[Any]:
        model = network()
        optimizer = build(model, torch.optim.Adam, dynamic_loss_scale=True)
        train(model, optimizer, 2)
        return [weakref.ref(x) for x in (model, optimizer, optimizer.optimizer, masters(optimizer)[0], model[0].weight)]

    references = run()
    collected()
    assert [reference() for reference in references] == [None] * 5


# -- checkpoints --


def test_state_dict_has_the_legacy_keys() -> None:
    model = network()
    optimizer = build(model, dynamic_loss_scale=True)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    assert set(state) == {
        "loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", "optimizer_state_dict",
        "fp32_from_fp16",
    }  # fmt: skip
    assert state["fp32_from_fp16"][0][0] is masters(optimizer)[0]
    assert state["dynamic_loss_scale"] is True


@pytest.mark.parametrize("interrupted_by", [1.0, torch.inf], ids=["", "a skipped step"])
def test_a_loaded_run_goes_on_bitwise(interrupted_by: float) -> None:
    model = network()
    optimizer = build(model, torch.optim.Adam, dynamic_loss_scale=True)
    train(model, optimizer, 3)
    train(model, optimizer, 1, interrupted_by)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    twin = network()
    with torch.no_grad():
        twin[0].weight.zero_()
    other = build(twin, torch.optim.Adam, dynamic_loss_scale=True)
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert other.overflow is (interrupted_by != 1.0)
    assert equal(snapshot(twin, other), snapshot(model, optimizer))
    train(model, optimizer)
    train(twin, other)
    assert equal(snapshot(twin, other), snapshot(model, optimizer))
    assert other.loss_scale == optimizer.loss_scale


def test_the_masters_alone_bring_the_weights() -> None:
    model, twin = network(), network()
    optimizer, other = build(model), build(twin)
    train(model, optimizer)
    other.load_state_dict(optimizer.state_dict())
    assert equal(list(twin.parameters()), list(model.parameters()))


def broken(state: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = {**state, key: value}
    return {name: item for name, item in changed.items() if item is not None}


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with another learning rate, which has this state for its first parameter."""
    return {"state": {0: state}, "param_groups": [{"params": [0, 1, 2, 3], "lr": 9.0}]}


FOREIGN: list[tuple[str, Any]] = [
    *((key, None) for key in ("loss_scaler", "dynamic_loss_scale", "optimizer_state_dict", "fp32_from_fp16")),
    ("loss_scaler", {"loss_scale": 2.0}),
    ("loss_scaler", 3),
    ("dynamic_loss_scale", False),
    ("optimizer_state_dict", {"state": {}}),
    ("optimizer_state_dict", {"state": {}, "param_groups": []}),
    ("optimizer_state_dict", {"state": {}, "param_groups": [{"params": [0]}]}),
    ("optimizer_state_dict", 3),
    # torch writes both into the optimizer before it raises: SGD's state has no "step", and no float is that large.
    ("optimizer_state_dict", whole({"momentum_buffer": torch.zeros(8, 4)})),
    ("optimizer_state_dict", whole({"step": 10**400})),
    ("dynamic_loss_scale", torch.zeros(2)),
    ("fp32_from_fp16", []),
    ("fp32_from_fp16", [[torch.zeros(1)] * 4]),
    ("fp32_from_fp16", 3),
    ("fp32_from_fp16", [3]),
    ("fp32_from_fp16", [[p.detach().numpy() for p in network(torch.float32).parameters()]]),
    ("fp32_from_fp16", [[p.detach().to("meta") for p in network(torch.float32).parameters()]]),
]


@pytest.mark.parametrize(("key", "value"), FOREIGN)
def test_a_torn_or_foreign_checkpoint_loads_nothing(key: str, value: Any) -> None:
    model = network()
    optimizer = build(model, torch.optim.Adam, dynamic_loss_scale=True, dynamic_loss_args=LOW)
    train(model, optimizer, 2)
    other = network()
    source = build(other, torch.optim.Adam, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4.0})
    train(other, source, 3)
    before, groups = snapshot(model, optimizer), optimizer.param_groups
    options = [dict(group) for group in groups]
    with pytest.raises(CheckpointError, match=key):
        optimizer.load_state_dict(broken(source.state_dict(), key, value))
    assert equal(snapshot(model, optimizer), before)
    assert optimizer.param_groups is groups
    assert groups == options
    assert optimizer.loss_scale == 2.0**10
    assert optimizer.overflow is False
    train(model, optimizer, 1)


@pytest.mark.parametrize("at", ["group", "parameter"])
def test_a_number_of_steps_beyond_floats_loads_nothing(at: str) -> None:
    model = network()
    optimizer = build(model, FusedAdam)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    inner = state["optimizer_state_dict"]
    (inner["param_groups"][0] if at == "group" else inner["state"][0])["step"] = 10**400
    if at == "parameter":
        del inner["param_groups"][0]["step"]
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=r"optimizer_state_dict.*too large"):
        optimizer.load_state_dict(state)
    assert equal(snapshot(model, optimizer), before)
    train(model, optimizer, 1)


def test_no_dict_at_all() -> None:
    with pytest.raises(CheckpointError, match="list"):
        build(network()).load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize("scheduled", [False, True])
def test_steps_count_once_after_a_checkpoint_was_loaded_under_automatic_scaling(scheduled: bool) -> None:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, scope="modules")
    handle.auto_scale()
    model = network()
    optimizer = build(model)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    train(model, optimizer, steps=2)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, steps=2)
    assert runtime_of(handle).optimizers.steps.all == 4
    handle.deactivate()
