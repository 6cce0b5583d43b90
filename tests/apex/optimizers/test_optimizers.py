"""Fused optimizers against the papers' formulas, tensor by tensor in fp64, and against torch's own."""

from __future__ import annotations

import collections
import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp.apex.multi_tensor_apply import multi_tensor_applier
from autoamp.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from autoamp.errors import UsageError

STEPS = 5
SHAPES = [(3, 4), (5,)]


def gradients() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]


def stepped(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the parameters after some steps with fixed gradients."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = make(params)
    for grads in gradients():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(dtype)
        optimizer.step()
    return [param.detach().double() for param in params]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("decoupled", "decay"), list(itertools.product([True, False], [0.0, 0.1])))
def test_adam_is_torchs(decoupled: bool, decay: float) -> None:
    theirs = torch.optim.AdamW if decoupled else torch.optim.Adam
    assert_close(
        stepped(lambda p: FusedAdam(p, lr=0.01, adam_w_mode=decoupled, weight_decay=decay)),
        stepped(lambda p: theirs(p, lr=0.01, weight_decay=decay), torch.float64),
    )


def by_formula(update: Callable[[dict[str, Any], Tensor, Tensor, int], Tensor]) -> list[Tensor]:
    """Return the parameters after as many steps of ``update(state, value, gradient, step)``, in fp64."""
    torch.manual_seed(0)
    values = [torch.randn(shape).double() for shape in SHAPES]
    states: list[dict[str, Any]] = [collections.defaultdict(float) for _ in SHAPES]
    for step, grads in enumerate(gradients(), start=1):
        values = [update(*given, step) for given in zip(states, values, [g.double() for g in grads], strict=True)]
    return values


def test_adam_without_bias_correction() -> None:
    def update(state: Any, value: Tensor, grad: Tensor, step: int) -> Tensor:
        state["first"] = 0.9 * state["first"] + 0.1 * grad
        state["second"] = 0.999 * state["second"] + 0.001 * grad**2
        return value - 0.01 * state["first"] / (state["second"].sqrt() + 1e-8)

    assert_close(stepped(lambda p: FusedAdam(p, lr=0.01, bias_correction=False)), by_formula(update), 1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
     {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}],
)  # fmt: skip
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    assert_close(
        stepped(lambda p: FusedSGD(p, lr=0.1, **options)),
        stepped(lambda p: torch.optim.SGD(p, lr=0.1, **options), torch.float64),
    )


def test_sgd_with_decay_after_momentum() -> None:
    def update(state: Any, value: Tensor, grad: Tensor, step: int) -> Tensor:
        state["velocity"] = 0.9 * state["velocity"] + grad
        return value - 0.1 * (state["velocity"] + 0.01 * value)

    ours = stepped(lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, wd_after_momentum=True))
    assert_close(ours, by_formula(update))


@pytest.mark.parametrize(("decay", "nvlamb", "clip", "averaging"), [
    (0.01, False, 1.0, True), (0.0, False, 0.0, True), (0.0, True, 1.0, False), (0.1, True, 0.5, True),
])  # fmt: skip
def test_lamb_follows_the_paper(decay: float, nvlamb: bool, clip: float, averaging: bool) -> None:
    totals = [float(torch.nn.utils.get_total_norm([grad.double() for grad in grads])) for grads in gradients()]

    def update(state: Any, value: Tensor, grad: Tensor, step: int) -> Tensor:
        clipped = grad * (min(1.0, clip / totals[step - 1]) if clip else 1.0)
        state["first"] = 0.9 * state["first"] + (0.1 if averaging else 1.0) * clipped
        state["second"] = 0.999 * state["second"] + 0.001 * clipped**2
        mean, square = state["first"] / (1 - 0.9**step), state["second"] / (1 - 0.999**step)
        change = mean / (square.sqrt() + 1e-6) + decay * value
        return value - 0.01 * (value.norm() / change.norm() if decay or nvlamb else 1.0) * change

    options = {"weight_decay": decay, "use_nvlamb": nvlamb, "max_grad_norm": clip, "grad_averaging": averaging}
    assert_close(stepped(lambda p: FusedLAMB(p, lr=0.01, **options)), by_formula(update), 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "entering"), [(0.01, 0.01), (0.0, 0.0), (50.0, 1.0)])
def test_lamb_clips_to_the_norm_of_all_groups_and_no_less(size: float, entering: float) -> None:
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = FusedLAMB([{"params": [param]} for param in params], max_grad_norm=1.0)
    for param, share in zip(params, (0.6, 0.8), strict=True):
        param.grad = torch.full((1,), share * size)
    optimizer.step()
    entered = [optimizer.state[param]["exp_avg"].item() / 0.1 for param in params]
    assert entered == pytest.approx([0.6 * entering, 0.8 * entering])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adagrad_is_torchs(decay: float) -> None:
    assert_close(
        stepped(lambda p: FusedAdagrad(p, lr=0.1, weight_decay=decay)),
        stepped(lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=decay), torch.float64),
    )


def test_adagrad_with_decoupled_decay() -> None:
    def update(state: Any, value: Tensor, grad: Tensor, step: int) -> Tensor:
        state["sum"] += grad**2
        return value - 0.1 * (grad / (state["sum"].sqrt() + 1e-10) + 0.1 * value)

    ours = stepped(lambda p: FusedAdagrad(p, lr=0.1, weight_decay=0.1, adagrad_w_mode=True))
    assert_close(ours, by_formula(update))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "reg_inside_moment": True}, {"grad_averaging": False},
        {"init_zero": True, "bias_correction": False}, {"norm_type": 0, "betas": (0.95, 0.6)}, {"betas": (0.95, 0.98)},
    ],
    ids=str,
)  # fmt: skip
def test_novograd_follows_the_paper(options: dict[str, Any]) -> None:
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    decay, inside = options.get("weight_decay", 0.0), options.get("reg_inside_moment", False)
    largest, corrected = options.get("norm_type", 2) == 0, options.get("bias_correction", True)
    weight = 1 - beta1 if options.get("grad_averaging", True) else 1.0

    def update(state: Any, value: Tensor, grad: Tensor, step: int) -> Tensor:
        # The second moment of the paper: of the norms' squares.
        norm = grad.abs().max() if largest else grad.square().sum()
        before = norm if step == 1 and not options.get("init_zero") else state["second"]
        state["second"] = beta2 * before + (1 - beta2) * norm
        size = (state["second"] if largest else state["second"].sqrt()) / (
            (1 - beta2**step) ** 0.5 if corrected else 1.0
        )
        size = size + 1e-8
        state["first"] = beta1 * state["first"] + weight * (grad / size + decay * value if inside else grad)
        mean = state["first"] / (1 - beta1**step if corrected else 1.0)
        return value - 0.01 * (mean if inside else mean / size + decay * value)

    assert_close(stepped(lambda p: FusedNovoGrad(p, lr=0.01, **options)), by_formula(update), 1e-5)


def test_norms_of_an_apex_checkpoint_are_taken() -> None:
    params = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(3).half())]
    optimizer = FusedNovoGrad(params)
    state = optimizer.state_dict()
    state["state"] = {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.ones(3)}}
    state["param_groups"][0].update(step=torch.tensor([4]), exp_avg_sq=[torch.tensor([2.0]), torch.tensor([3.0])])
    optimizer.load_state_dict(state)
    assert [optimizer.state[param]["exp_avg_sq"].item() for param in params] == [3.0, 2.0]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert type(optimizer.param_groups[0]["step"]) is int
    assert optimizer.param_groups[0]["step"] == 5
    assert optimizer.state[params[0]]["exp_avg_sq"].item() == pytest.approx((0.999 * 9.0 + 0.001 * 3.0) ** 0.5)
    assert "exp_avg_sq" not in optimizer.state_dict()["param_groups"][0]


@pytest.mark.parametrize("way", ["scaled", "unscaled before", "disabled"])
def test_mixed_precision_lamb_takes_a_grad_scaler(way: str, half: torch.dtype) -> None:
    """Every second step overflows, and is none."""
    dtype = torch.float32 if way == "unscaled before" else half  # GradScaler.unscale_ refuses half gradients
    plain, ours = (torch.nn.Parameter(torch.full((4,), 2.0, dtype=dtype)) for _ in range(2))
    reference, optimizer = FusedLAMB([plain], lr=0.05), FusedMixedPrecisionLamb([ours], lr=0.05, step=7)
    reference.param_groups[0]["step"] = 7
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=way != "disabled")
    for values in ([1.0, -2.0, 3.0, 0.5], [torch.inf, 1.0, 1.0, 1.0], [0.25, 2.0, -1.0, 4.0]):
        if way == "disabled" and torch.inf in values:
            continue
        plain.grad = torch.tensor(values).to(dtype)
        ours.grad = scaler.scale(torch.tensor(values)).to(dtype)
        if way == "unscaled before":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if torch.inf not in values:
            reference.step()
    assert torch.equal(ours, plain)
    assert optimizer.param_groups[0]["step"] == 9
    assert scaler.get_scale() == (1.0 if way == "disabled" else 32.0)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda p: FusedAdam(p, adam_w_mode=False, weight_decay=0.5), "adam_w_mode"),
        (lambda p: FusedLAMB(p, use_nvlamb=True, weight_decay=0.0), "use_nvlamb"),
        (lambda p: FusedSGD(p, 0.1, 0.9, weight_decay=0.5, wd_after_momentum=True), "wd_after_momentum"),
        (lambda p: FusedAdagrad(p, weight_decay=0.5, adagrad_w_mode=True), "adagrad_w_mode"),
        (lambda p: FusedNovoGrad(p, weight_decay=0.5, reg_inside_moment=True), "reg_inside_moment"),
        (lambda p: FusedMixedPrecisionLamb(p, reduced_precision_dtype=torch.float32), "reduced_precision_dtype"),
        (lambda p: FusedAdam(p, eps=0.5, eps_inside_sqrt=True, max_grad_norm=0.5), "_eps_inside_sqrt"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))], ids=["copy", "pickle"]
)
def test_copies_keep_the_options(make: Any, option: str, way: Any) -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = make([param])
    param.grad = torch.tensor([0.5, -1.0])
    optimizer.step()
    other = way(optimizer)
    assert getattr(other, option) == getattr(optimizer, option)
    assert other.set_grad_none is optimizer.set_grad_none
    (copied,) = other.param_groups[0]["params"]
    assert copied is not param
    param.grad, copied.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    other.step()
    assert torch.equal(copied, param)


def test_checkpoints_of_torch_are_taken() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer, other = FusedAdam([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0)
    theirs.grad = torch.tensor([1.0, 2.0, -3.0])
    for _ in range(3):
        other.step()
    state = other.state_dict()
    del state["param_groups"][0]["betas"]
    optimizer.load_state_dict(state | {"param_groups": [{**state["param_groups"][0], "bias_correction": True}]})
    ours.data.copy_(theirs.data)
    ours.grad = theirs.grad.clone()
    optimizer.step()
    other.step()
    assert optimizer.param_groups[0]["step"] == 4
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedSGD, FusedAdagrad, FusedNovoGrad])
def test_half_parameters_have_fp32_state_that_a_checkpoint_keeps(kind: Any, half: torch.dtype) -> None:
    extra = {"momentum": 0.9} if kind is FusedSGD else {}
    param = torch.nn.Parameter(torch.randn(4).to(half))
    optimizer = kind([param], lr=0.01, **extra)
    param.grad = torch.randn(4).to(half)
    optimizer.step()
    states = {name: value.clone() for name, value in optimizer.state[param].items()}
    assert states
    assert {value.dtype for value in states.values()} == {torch.float32}
    other = kind([torch.nn.Parameter(param.detach().clone())], lr=0.5, **extra)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (loaded,) = other.param_groups[0]["params"]
    loaded.grad = param.grad.clone()
    for name, value in states.items():
        assert torch.equal(other.state[loaded][name], value)
        assert other.state[loaded][name].dtype is torch.float32
    optimizer.step()
    other.step()
    assert torch.equal(param, loaded)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedSGD, FusedAdagrad, FusedNovoGrad, FusedMixedPrecisionLamb])
def test_a_checkpoint_adds_no_state(kind: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = kind(params, lr=0.01, **({"momentum": 0.9} if kind is FusedSGD else {}))
    params[1].grad = torch.ones(2)
    optimizer.step()
    assert list(optimizer.state) == [params[1]]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert list(optimizer.state) == [params[1]]
    assert list(optimizer.state_dict()["state"]) == [1]


@pytest.mark.parametrize(
    ("kind", "option"),
    [(FusedAdam, {"master_weights": True}), (FusedMixedPrecisionLamb, {"reduced_precision_dtype": torch.half})],
)
def test_masters_keep_what_half_rounds_off(kind: Any, option: dict[str, Any]) -> None:
    plain, kept = torch.nn.Parameter(torch.ones(1).half()), torch.nn.Parameter(torch.ones(1).half())
    optimizers = [kind([plain], lr=1e-4), kind([kept], lr=1e-4, **option)]
    for _ in range(20):
        for param in (plain, kept):
            param.grad = torch.ones(1).half()
        for optimizer in optimizers:
            optimizer.step()
    assert plain == 1.0
    assert optimizers[1].state[kept]["master_param"].dtype is torch.float32
    assert kept.item() == pytest.approx(1.0 - 20e-4, abs=5e-4)


def test_closure_scheduler_and_missing_gradients() -> None:
    used, unused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([used, unused], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 1.0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert used != 1.0
    assert unused == 1.0


def test_parameters_larger_than_a_part_are_stepped_as_each_alone() -> None:
    sizes, ends = (5, 2**20, 3, 2**20 + 1, 7), []
    for alone in (False, True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
        optimizers = [FusedAdam(group, weight_decay=0.1) for group in ([[p] for p in params] if alone else [params])]
        for param in params:
            param.grad = torch.randn_like(param)
        for optimizer in optimizers:
            optimizer.step()
        ends.append(params)
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize(("kind", "plain"), [(FusedAdam, torch.optim.AdamW), (FusedSGD, torch.optim.SGD)])
@pytest.mark.parametrize("in_order", [True, False])
def test_gradients_of_any_strides(kind: Any, plain: Any, in_order: bool) -> None:
    settings = {"lr": 0.1, "weight_decay": 0.1, **({"momentum": 0.9} if kind is FusedSGD else {})}
    ends = []
    for make in (kind, plain):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(3, 4))
        optimizer = make([param], **settings)
        for _ in range(STEPS):
            grad = torch.randn(4, 3)
            param.grad = grad.view(3, 4) if in_order else grad.t()
            optimizer.step()
        ends.append([param.detach()])
    assert_close(*ends)


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_zero_grad_follows_the_constructor(set_grad_none: bool) -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([param], set_grad_none=set_grad_none)
    param.grad = torch.ones(1)
    optimizer.zero_grad()
    assert (param.grad is None) is set_grad_none
    optimizer.zero_grad(set_to_none=True)
    assert param.grad is None


@pytest.mark.parametrize(("kind", "options", "told"), [
    (FusedAdam, {"amsgrad": True}, "amsgrad"), (FusedLAMB, {"amsgrad": True}, "amsgrad"),
    (FusedNovoGrad, {"amsgrad": True}, "amsgrad"), (FusedNovoGrad, {"norm_type": 1}, "norm_type=1"),
    (FusedSGD, {"lr": 0.1, "nesterov": True}, "nesterov"), (FusedSGD, {"lr": -1.0}, "lr=-1"),
])  # fmt: skip
def test_options_that_are_refused(kind: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        kind([torch.nn.Parameter(torch.ones(2))], **options)


def test_sparse_gradients_are_refused() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2).to_sparse()
    with pytest.raises(UsageError, match="sparse"):
        FusedAdam([param]).step()


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_a_refused_gradient_leaves_no_state_of_the_parameters_before_it(kind: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    params[0].grad, params[1].grad = torch.ones(2), torch.ones(2).to_sparse()
    optimizer = kind(params, lr=0.1, **({"momentum": 0.9} if kind is FusedSGD else {}))
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
    assert not any(optimizer.state.values())


def test_sgd_takes_its_learning_rate_from_the_groups() -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = FusedSGD([{"params": [first], "lr": 0.25}, {"params": [second], "lr": 0.5}])
    for param in (first, second):
        param.grad = torch.ones(2)
    optimizer.step()
    assert (first.tolist(), second.tolist()) == ([0.75] * 2, [0.5] * 2)
    groups = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="required optimization parameter lr"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == groups
    with pytest.raises(ValueError, match="required optimization parameter lr"):
        FusedSGD([torch.nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_divides_by_the_most_recent_scale(momentum: float, half: torch.dtype) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(3).to(half)) for _ in range(2))
    scaled, plain = FusedSGD([ours], 0.25, momentum), FusedSGD([theirs], 0.25, momentum)
    assert (scaled.most_recent_scale, scaled.scale_set_by_backward) == (1.0, False)
    for _ in range(3):
        ours.grad, theirs.grad = torch.full((3,), 64.0).to(half), torch.full((3,), 0.5).to(half)
        scaled.most_recent_scale, scaled.scale_set_by_backward = 128.0, True
        scaled.step()
        plain.step()
        assert (scaled.most_recent_scale, scaled.scale_set_by_backward) == (1.0, False)
    assert torch.equal(ours, theirs)
    assert ours.grad.tolist() == [64.0] * 3


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("decoupled", "decay"), list(itertools.product([True, False], [0.0, 0.1])))
def test_capturable_adam_is_the_plain_one(masters: bool, dtype: torch.dtype, decoupled: bool, decay: float) -> None:
    options = {"lr": 0.01, "adam_w_mode": decoupled, "weight_decay": decay, "master_weights": masters}
    plain = stepped(lambda p: FusedAdam(p, **options), dtype)
    found = stepped(lambda p: FusedAdam(p, capturable=True, **options), dtype)
    # A last digit in fp32 may round another way in half.
    assert_close(found, plain, {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype])
    uncorrected = [stepped(lambda p, c=c: FusedAdam(p, capturable=c, bias_correction=False)) for c in (False, True)]
    assert_close(*uncorrected)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_capturable_adam_takes_a_grad_scaler(masters: bool, unscale: bool) -> None:
    """Against AdamW in fp64 with the true gradients; every third step overflows, and is none."""
    dtype = torch.float32 if unscale else torch.float16  # GradScaler.unscale_ refuses half gradients
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]).to(dtype))
    theirs = torch.nn.Parameter(param.detach().double())
    optimizer = FusedAdam([param], lr=0.01, capturable=True, master_weights=masters)
    reference = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(6):
        grad = torch.tensor([0.5, 0.25, -1.0]) / (step + 1)
        before, state = param.detach().clone(), copy.deepcopy(optimizer.state_dict())
        param.grad = (scaler.scale(grad) if step % 3 else torch.tensor([float("inf"), 1.0, float("nan")])).to(dtype)
        scaler.scale(torch.ones(()))
        scale = scaler.get_scale()
        if unscale:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer) is None
        scaler.update()
        if step % 3 == 0:
            assert torch.equal(param, before)
            assert scaler.get_scale() == scale / 2
            assert int(optimizer.param_groups[0]["step"]) == int(state["param_groups"][0]["step"])
            continue
        theirs.grad = grad.double()
        reference.step()
        torch.testing.assert_close(param.grad.float(), grad, rtol=1e-3, atol=0)
        torch.testing.assert_close(param.double(), theirs, rtol=2e-3, atol=2e-3)
    assert int(optimizer.param_groups[0]["step"]) == 4
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_only_a_capturable_adam_unscales_itself() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((param * param).sum()).backward()
    scaler.step(optimizer)
    assert param.grad.tolist() == [2.0] * 2


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD, FusedMixedPrecisionLamb])
def test_arguments_of_a_step_that_are_refused(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step(grads=None, grad_scaler=None)
    # `FusedAdam` takes gradients, as that of early 2019 did.
    refused = [("grads", "from .grad")] if kind is not FusedAdam else []
    for name, remedy in (*refused, ("grad_scaler", r"scaler.step\(optimizer\)")):
        with pytest.raises(UsageError, match=f"got {name}.*{remedy}"):
            optimizer.step(**{name: 1})


def test_masters_of_adam_by_group(half: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.full((2,), float(value)).to(half)) for value in range(3)]
    optimizer = FusedAdam([{"params": params[:2]}], lr=0.5, capturable=True, master_weights=True)
    optimizer.add_param_group({"params": params[2:]})
    (first, second) = (group["params"] for group in optimizer.param_groups_master)
    assert [master.tolist() for master in [*first, *second]] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    assert {master.dtype for master in first} == {torch.float32}
    assert not any(master.requires_grad for master in first)
    params[0].grad = torch.ones(2).to(half)
    optimizer.step()
    assert torch.equal(optimizer.param_groups_master[0]["params"][0].to(half), params[0])
    assert optimizer.param_groups_master[0]["params"][0] is first[0]
    assert FusedAdam(params).param_groups_master is None


def test_capturable_adam_resumes_and_follows_a_schedule() -> None:
    def made(capturable: bool) -> tuple[torch.nn.Parameter, FusedAdam]:
        param = torch.nn.Parameter(torch.ones(3))
        return param, FusedAdam([param], lr=0.1, capturable=capturable)

    def train(param: torch.nn.Parameter, optimizer: FusedAdam, steps: int) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(steps):
            param.grad = torch.full((3,), step + 1.0)
            optimizer.step()
            schedule.step()

    param, optimizer = made(True)
    plain, other = made(False)
    train(param, optimizer, 3)
    train(plain, other, 3)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.0125)
    torch.testing.assert_close(param, plain)
    for state in (optimizer.state_dict(), other.state_dict()):
        for capturable in (True, False):
            again, resumed = made(capturable)
            with torch.no_grad():
                again.copy_(plain)
            resumed.load_state_dict(copy.deepcopy(state))
            assert int(resumed.param_groups[0]["step"]) == 3
            assert isinstance(resumed.param_groups[0]["step"], Tensor) is capturable
            again.grad = torch.ones(3)
            resumed.step()
            kept = pickle.loads(pickle.dumps(resumed))
            assert kept.capturable is capturable
    with pytest.raises(UsageError, match="one device"):
        FusedAdam([torch.nn.Parameter(torch.ones(1, device=d)) for d in ("cpu", "meta")], capturable=True)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_of_halves_rounds_once_a_step(nesterov: bool, half: torch.dtype) -> None:
    """The velocity stays in fp32, and a parameter is the fp32 result of its step, rounded; torch rounds each part."""
    torch.manual_seed(0)
    start = torch.randn(2000).to(half)
    param, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    optimizer, other = FusedSGD([param], **options), torch.optim.SGD([theirs], **options)
    velocity = None
    for _ in range(STEPS):
        before = param.detach().float()
        param.grad = torch.randn(2000).to(half)
        theirs.grad = param.grad.clone()
        grad = param.grad.float() + 0.01 * before
        velocity = grad if velocity is None else 0.9 * velocity + grad
        optimizer.step()
        other.step()
        buffer = optimizer.state[param]["momentum_buffer"]
        assert buffer.dtype is torch.float32
        torch.testing.assert_close(buffer, velocity, rtol=1e-6, atol=1e-6)
        wide = before - 0.1 * (grad + 0.9 * buffer if nesterov else buffer)
        # The same sums in another order may round another way, in a few places.
        assert (param.detach() != wide.to(half)).float().mean() < 1e-2
    assert (param != theirs).float().mean() > 0.05


class AdamOfAnother(FusedAdam):
    """Steps by Apex's function itself, as fairseq's optimizer does."""

    def step(self, closure: Any = None, **given: Any) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = group["params"]
            averages, squares = ([torch.zeros_like(one) for one in params] for _ in range(2))
            lists = [[param.grad for param in params], params, averages, squares]
            multi_tensor_applier(
                self.multi_tensor_adam, self._dummy_overflow_buf, lists, group["lr"], *group["betas"], group["eps"],
                group["step"], 1, True, group["weight_decay"],
            )  # fmt: skip


def test_subclasses_may_call_the_functions_of_apex() -> None:
    weights = torch.randn(3, 4)
    found, expected = torch.nn.Parameter(weights.clone()), torch.nn.Parameter(weights.clone())
    for param, kind in ((found, AdamOfAnother), (expected, FusedAdam)):
        param.grad = torch.ones_like(param)
        kind([param], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(found, expected)
    assert callable(FusedSGD([found], lr=0.1).multi_tensor_sgd)
    lamb = FusedLAMB([found])
    assert callable(lamb.multi_tensor_lamb)
    assert callable(lamb.multi_tensor_l2norm)
    flag = lamb._dummy_overflow_buf
    assert flag.tolist() == [0]
    multi_tensor_applier(lamb.multi_tensor_l2norm, flag, [[torch.full((2,), float("inf"))]], False)
    assert lamb._dummy_overflow_buf is flag
    lamb._dummy_overflow_buf = torch.ones(1)
    assert FusedSGD([{"params": []}, {"params": [found]}], lr=0.1)._dummy_overflow_buf.shape == (1,)
