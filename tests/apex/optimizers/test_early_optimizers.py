"""FusedAdam and FP16_Optimizer of early 2019 against arithmetic in fp64, and what programs of that time reach into."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import fp16_utils, optimizers
from autoamp.apex.contrib.optimizers.fused_adam import ContribFusedAdam
from autoamp.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler
from autoamp.apex.optimizers import FusedAdam
from autoamp.errors import LossScaleError, UsageError


def param(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


# -- FusedAdam --


def test_both_eras_are_one_class() -> None:
    later = FusedAdam([param(1.0)], 0.1, True, (0.9, 0.99), 1e-6, False, 0.1, False, True, False, True)
    assert (later.adam_w_mode, later.master_weights) == (False, True)
    early = FusedAdam([param(1.0)], lr=0.1, bias_correction=False, max_grad_norm=1.0, eps_inside_sqrt=True, use_mt=True)
    assert early.param_groups[0]["max_grad_norm"] == 1.0
    for optimizer in (later, early):
        assert isinstance(optimizer, optimizers.FusedAdam)
    with pytest.raises(UsageError, match="amsgrad"):
        FusedAdam([param(1.0)], amsgrad=True)


def test_max_grad_norm_is_for_each_group() -> None:
    big, small, free = param(1.0, 1.0), param(1.0), param(1.0)
    groups = [{"params": [big]}, {"params": [small]}, {"params": [free], "max_grad_norm": 0.0}]
    optimizer = FusedAdam(groups, bias_correction=False, max_grad_norm=1.0)
    big.grad, small.grad, free.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.5]), torch.tensor([7.0])
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg"] / 0.1 for p in (big, small, free)]
    torch.testing.assert_close(moments, [torch.tensor([0.6, 0.8]), torch.tensor([0.5]), torch.tensor([7.0])])
    assert big.grad.tolist() == [3.0, 4.0]
    optimizer.add_param_group({"params": [param(2.0)]})
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("inside", [False, True])
def test_eps_inside_sqrt(inside: bool) -> None:
    one = param(1.0, 2.0)
    optimizer = FusedAdam([one], lr=0.1, eps=0.5, eps_inside_sqrt=inside)
    grads = [torch.tensor([0.3, -0.7]), torch.tensor([1.0, 0.2])]
    value, first, second = torch.tensor([1.0, 2.0]).double(), torch.zeros(2).double(), torch.zeros(2).double()
    for step, grad in enumerate(grads, start=1):
        one.grad = grad
        optimizer.step()
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad.double() ** 2
        mean, square = first / (1 - 0.9**step), second / (1 - 0.999**step)
        value = value - 0.1 * mean / ((square + 0.5).sqrt() if inside else square.sqrt() + 0.5)
    torch.testing.assert_close(one.detach().double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["list", "generator", "a list for each group"])
def test_step_takes_gradients_scale_and_outputs(form: str) -> None:
    ours, without, expected = param(1.0, -2.0), param(3.0), param(1.0, -2.0)
    optimizer = FusedAdam([ours, without], lr=0.1)
    reference = optimizers.FusedAdam([expected], lr=0.1)
    outputs = [torch.zeros(2).half(), torch.zeros(1).half()]
    ours.grad = torch.full((2,), torch.nan)
    for values in ([8.0, 16.0], [-4.0, 2.0]):
        grads: Any = [torch.tensor(values).half(), None]
        expected.grad = torch.tensor(values) / 8.0
        given = {"list": grads, "generator": (g for g in grads), "a list for each group": [grads]}[form]
        optimizer.step(grads=given, output_params=[outputs] if "each" in form else outputs, scale=8.0)
        reference.step()
    torch.testing.assert_close(ours, expected)
    assert torch.equal(outputs[0], ours.detach().half())
    assert outputs[1].item() == without.item() == 3.0
    # What was given is for one step.
    ours.grad = None
    optimizer.step()
    torch.testing.assert_close(ours, expected)


def test_norms_that_are_given_are_of_scaled_gradients() -> None:
    first, second = param(1.0), param(1.0)
    optimizer = FusedAdam([{"params": [first]}, {"params": [second]}], bias_correction=False, max_grad_norm=1.0)
    optimizer.step(None, [[torch.tensor([8.0])], [torch.tensor([8.0])]], None, 4.0, [torch.tensor(80.0), 2.0])
    moments = [(optimizer.state[p]["exp_avg"] / 0.1).item() for p in (first, second)]
    assert moments == pytest.approx([0.1, 2.0])


def test_lists_that_do_not_fit_change_nothing() -> None:
    one, two = param(1.0), param(1.0)
    optimizer = FusedAdam([{"params": [one]}, {"params": [two]}])
    one.grad = two.grad = torch.ones(1)
    for bad in [{"grads": [torch.ones(1)]}, {"output_params": [[torch.ones(1)], []]}, {"grad_norms": [1.0]}]:
        with pytest.raises(UsageError, match=next(iter(bad))):
            optimizer.step(**bad)
    assert one.item() == two.item() == 1.0
    assert not optimizer.state


def test_closure_and_failure_leave_nothing_behind() -> None:
    one = param(1.0)
    optimizer, grad = FusedAdam([one], lr=0.1), torch.ones(1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0, grads=[grad], scale=2.0)
    held = weakref.ref(grad)
    del grad
    gc.collect()
    assert held() is None

    def closure() -> Tensor:
        one.grad = torch.ones(1)
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    assert optimizer.state[one]["exp_avg"].item() == pytest.approx(0.1)


def test_checkpoint_of_another_era() -> None:
    later, early = param(1.0), param(1.0)
    source, target = optimizers.FusedAdam([later], lr=0.1), FusedAdam([early], lr=0.3, max_grad_norm=0.5)
    later.grad = torch.ones(1)
    source.step()
    state = source.state_dict()
    del state["param_groups"][0]["max_grad_norm"]
    target.load_state_dict(state)
    assert (target.param_groups[0]["max_grad_norm"], target.param_groups[0]["step"]) == (0.5, 1)
    # Apex of early 2019 counted the steps of each parameter.
    state = source.state_dict()
    del state["param_groups"][0]["step"]
    state["state"][0]["step"] = 6
    target.load_state_dict(state)
    assert target.param_groups[0]["step"] == 6
    early.grad = torch.ones(1)
    target.step()
    assert target.param_groups[0]["step"] == 7


def test_positions_of_contrib() -> None:
    optimizer = ContribFusedAdam([param(1.0)], 0.1, False, (0.9, 0.99), 1e-6, True, 0.01, 2.0, False, True)
    assert (optimizer.adam_w_mode, optimizer._eps_inside_sqrt) == (True, True)
    assert (optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["max_grad_norm"]) == (0.01, 2.0)


# -- FP16_Optimizer --


class Rig:
    """A half linear model of one output, its inputs, and FP16_Optimizer over the early FusedAdam."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(8, 1).half()
        self.inputs = torch.randn(12, 8).half()
        groups = [{"params": [self.model.weight], "weight_decay": 0.01}, {"params": [self.model.bias]}]
        self.inner = FusedAdam(groups, lr=0.05, bias_correction=False, max_grad_norm=1.0)
        self.optimizer = FP16_Optimizer(self.inner, **options)

    def loss(self) -> Tensor:
        return (self.model(self.inputs).float() - 1).square().mean()

    def step(self) -> float:
        loss = self.loss()
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize(
    "options",
    [{"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1024.0}}, {"static_loss_scale": 128}],
    ids=str,
)
def test_bert_pattern_is_adam_in_fp32_on_unscaled_clipped_gradients(options: dict[str, Any]) -> None:
    rig = Rig(**options)
    halves = (rig.model.weight, rig.model.bias)
    exact = [nn.Parameter(half.detach().double()) for half in halves]
    groups = [{"params": [exact[0]], "weight_decay": 0.01}, {"params": [exact[1]]}]
    reference = optimizers.FusedAdam(groups, bias_correction=False)
    clipped, losses = 0.0, []
    for turn in range(30):
        for group in (*rig.optimizer.param_groups, *reference.param_groups):
            group["lr"] = 0.05 * (1 - turn / 30)
        for param, grad in zip(exact, torch.autograd.grad(rig.loss() * 128, halves), strict=True):
            param.grad = grad.double() / 128
            clipped = max(clipped, float(nn.utils.clip_grad_norm_(param, 1.0)))
        reference.step()
        losses.append(rig.step())
    assert clipped > 1.0
    assert losses[-1] < 0.7 * losses[0]
    masters = [group[0].double() for group in rig.optimizer.fp32_from_fp16_groups]
    torch.testing.assert_close(masters, exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("options", [{"dynamic_loss_scale": True}, {"static_loss_scale": 128}], ids=str)
@pytest.mark.parametrize("way", ["loss_scale", "cur_scale", "loss_scaler.cur_scale"])
def test_scale_that_is_written_takes_effect(options: dict[str, Any], way: str) -> None:
    rig = Rig(**options)
    assert isinstance(rig.optimizer, autoamp.FP16_Optimizer)
    assert rig.optimizer.dynamic_loss_scale is ("dynamic_loss_scale" in options)
    owner: Any = rig.optimizer.loss_scaler if "." in way else rig.optimizer
    name = way.rpartition(".")[2]
    assert getattr(owner, name) == (2.0**16 if rig.optimizer.dynamic_loss_scale else 128)
    for scale in (2.0**30, 4):
        setattr(owner, name, scale)
        assert rig.optimizer.loss_scale == rig.optimizer.cur_scale == rig.optimizer.loss_scaler.cur_scale == scale
    seen: list[Tensor] = []
    rig.model.bias.register_hook(seen.append)
    rig.optimizer.backward(rig.loss())
    (true,) = torch.autograd.grad(rig.loss(), rig.model.bias)
    torch.testing.assert_close(seen[0].float(), true.float() * 4, rtol=5e-3, atol=1e-3)
    with pytest.raises(LossScaleError, match="0"):
        setattr(owner, name, 0)
    assert rig.optimizer.loss_scale == 4


def test_groups_that_old_code_reads() -> None:
    model = nn.Sequential(nn.Linear(4, 3).half(), nn.LayerNorm(3))
    optimizer = FP16_Optimizer(FusedAdam([{"params": list(m.parameters())} for m in model]))
    assert [[p is q for p, q in zip(g, model[0].parameters(), strict=True)] for g in optimizer.fp16_groups[:1]] == [
        [True, True]
    ]
    assert [len(group) for group in optimizer.fp16_groups] == [2, 0]
    assert [len(group) for group in optimizer.fp32_from_fp16_groups] == [2, 0]
    assert [len(group) for group in optimizer.fp32_from_fp32_groups] == [0, 2]
    assert optimizer.fp32_from_fp32_groups[1][0] is model[1].weight
    master = optimizer.fp32_from_fp16_groups[0][0]
    assert master is optimizer.param_groups[0]["params"][0]
    assert (master.dtype, master.shape) == (torch.float32, model[0].weight.shape)
    assert [flat.numel() for flat in optimizer.fp32_groups_flat] == [15, 0]
    assert not hasattr(optimizer, "nope")


# -- scalers by hand --


def test_scalers_by_hand() -> None:
    scaler = DynamicLossScaler(init_scale=8.0, scale_window=2)
    assert isinstance(scaler, fp16_utils.DynamicLossScaler)
    inf = param(1.0)
    inf.grad = torch.tensor([torch.inf])
    scaler.cur_scale = 2.0**70
    assert scaler.loss_scale == scaler.cur_scale == 2.0**70
    scaler.update_scale(True)
    assert scaler.cur_scale == 2.0**69
    static = LossScaler(128)
    assert isinstance(static, fp16_utils.LossScaler)
    static.cur_scale = 4
    assert static.loss_scale == 4.0
    assert not static.has_overflow([inf])


# -- the tree --


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_early_adam_under_levels(apex: Any, level: str) -> None:
    model = nn.Linear(8, 1)
    optimizer = apex.optimizers.FusedAdam(model.parameters(), lr=0.05, max_grad_norm=0.5)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level, loss_scale=256.0, verbosity=0)
    inputs = torch.randn(12, 8)
    for _ in range(8):
        optimizer.zero_grad()
        loss = (model(inputs).float() - 3).square().mean()
        with apex.amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in apex.amp.master_params(optimizer)])
        before = [optimizer.state[p]["exp_avg"].clone() for p in apex.amp.master_params(optimizer) if optimizer.state]
        optimizer.step()
        if not before:
            entered = [optimizer.state[p]["exp_avg"] / 0.1 for p in apex.amp.master_params(optimizer)]
            assert norm > 0.5
            assert torch.nn.utils.get_total_norm(entered).item() == pytest.approx(0.5, rel=1e-3)
            first = loss.item()
    assert loss.item() < first


@pytest.mark.parametrize("masters", [False, True])
def test_adam_of_the_alias_with_a_grad_scaler(masters: bool, half: torch.dtype) -> None:
    """Clipped, after unscaling."""
    params = [nn.Parameter(torch.tensor([1.0, -2.0]).to(half)) for _ in range(2)]
    optimizers_ = [
        FusedAdam([param], lr=0.1, capturable=place == 0, master_weights=masters, max_grad_norm=0.5)
        for place, param in enumerate(params)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(3):
        for place, param in enumerate(params):
            param.grad = torch.tensor([3.0, 4.0]).to(half) * (256.0 if place == 0 else 1.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizers_[0])
        optimizers_[1].step(grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None)
        scaler.update()
        assert [param.grad.tolist() for param in params] == [[3.0, 4.0]] * 2
    torch.testing.assert_close(*params, rtol=2e-2, atol=0)
