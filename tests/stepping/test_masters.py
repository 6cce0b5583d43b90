"""Master weights: who has which gradient, groups that grow, state that moves, and the way back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

import autoamp
from autoamp.errors import NonFiniteGradientsError
from autoamp.stepping import MasterWeights, fit_state, master_of
from tests.stepping.networks import backward, data, equal, grads, loss_of, masters, network, o2, sgd, snapshot

# -- values --


def test_masters_start_from_the_fp32_values() -> None:
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    assert equal(masters(optimizer), before)
    assert equal([p.detach() for p in model.parameters()], [b.half() for b in before])
    for half, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert master_of(half) is master
        assert master.requires_grad
        assert master.is_leaf
    assert master_of(nn.Linear(1, 1).weight) is None


def test_gradients_go_up_unscaled_and_weights_come_down(half: torch.dtype) -> None:
    model, reference = network(), network()
    optimizer, plain = sgd(model.parameters()), sgd(reference.parameters())
    o2(model, optimizer, dtype=half)
    for step in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        backward(model, optimizer, step)
        loss_of(reference, step).backward()
        for p, q in zip(masters(optimizer), reference.parameters(), strict=True):
            assert p.grad.dtype is torch.float32
            torch.testing.assert_close(p.grad, q.grad, atol=0.05, rtol=0.05)
        optimizer.step()
        plain.step()
        for p, master in zip(model.parameters(), masters(optimizer), strict=True):
            assert torch.equal(p, master.to(half))
    for p, q in zip(masters(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=0.03, rtol=0.03)


def test_small_steps_add_up_in_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = sgd(model.parameters(), lr=1e-4, momentum=0)
    o2(model, optimizer)
    for _ in range(10):
        optimizer.zero_grad()
        with autoamp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    # One step is far below the distance of 2**-11 between half numbers under 1.
    torch.testing.assert_close(model.weight.item(), 0.99902, atol=1e-5, rtol=0)


# -- clearing gradients, wherever and however --


def clear_on_model(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()


def zero_on_model(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad(set_to_none=False)


def clear_on_optimizer(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def zero_on_optimizer(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def none_on_params(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = None


def none_on_masters(model: nn.Module, optimizer: Any) -> None:
    for p in masters(optimizer):
        p.grad = None


def zero_masters(model: nn.Module, optimizer: Any) -> None:
    for p in masters(optimizer):
        if p.grad is not None:
            p.grad.zero_()


CLEARINGS = [
    clear_on_model, zero_on_model, clear_on_optimizer, zero_on_optimizer, none_on_params, none_on_masters, zero_masters,
]  # fmt: skip


@pytest.mark.parametrize("clear", CLEARINGS)
@pytest.mark.parametrize("blocks", [True, False], ids=["scale_loss", "plain backward"])
def test_gradients_are_those_of_the_last_backward_pass(clear: Callable[..., None], blocks: bool) -> None:
    """Steps after any kind of clearing equal those of a fresh run from the same weights, with and without blocks."""

    def run(clear: Callable[..., None]) -> list[Tensor]:
        model = network()
        optimizer = sgd(model.parameters())
        o2(model, optimizer, loss_scale=8.0 if blocks else 1.0)
        for step in range(4):
            clear(model, optimizer)
            if blocks:
                backward(model, optimizer, step)
            else:
                loss_of(model, step).backward()
            optimizer.step()
        return snapshot(model, optimizer)

    def fresh(model: nn.Module, optimizer: Any) -> None:
        for tensor in (*model.parameters(), *masters(optimizer)):
            tensor.grad = None

    reference = run(fresh)
    assert equal(run(clear), reference)
    assert not equal(run(lambda *_: None), reference)


def test_zero_grad_frees_the_gradients_of_half_parameters() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    backward(model, optimizer)
    optimizer.zero_grad()
    assert [p.grad for p in model.parameters()] == [None] * 4
    backward(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    loss_of(model).backward()
    optimizer.zero_grad()
    assert [p.grad for p in model.parameters()] == [None] * 4


@pytest.mark.parametrize("patched", [torch.optim.Optimizer, torch.optim.SGD])
def test_what_zero_grad_leaves_is_stepped(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def clear_the_first(optimizer: Any, set_to_none: bool = True) -> None:
        masters(optimizer)[0].grad = None

    model = network()
    optimizer = sgd(model.parameters(), momentum=0.0)
    o2(model, optimizer, loss_scale=1.0)
    before = [master.detach().clone() for master in masters(optimizer)]
    backward(model, optimizer)
    monkeypatch.setattr(patched, "zero_grad", clear_the_first)
    optimizer.zero_grad()
    optimizer.step()
    moved = [not torch.equal(old, new) for old, new in zip(before, masters(optimizer), strict=True)]
    assert moved == [False, True, True, True]


def test_parameters_that_a_loss_does_not_reach_keep_no_old_gradient() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    none_on_masters(model, optimizer)
    with autoamp.scale_loss(model[0](data()[0].half()).sum(), optimizer) as scaled:
        scaled.backward()
    assert [g is None for g in grads(optimizer)] == [False, False, True, True]


def test_plain_backward_and_clipping() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=1.0, momentum=0)
    o2(model, optimizer, dtype=torch.bfloat16, loss_scale=1.0)
    before = [p.detach().clone() for p in masters(optimizer)]
    for _ in range(2):
        optimizer.zero_grad()
        (loss_of(model) * 100).backward()
        norm = nn.utils.clip_grad_norm_(autoamp.master_params(optimizer), 0.5)
        assert norm > 1.0
        optimizer.step()
        now = [p.detach().clone() for p in masters(optimizer)]
        moved = torch.cat([(a - b).flatten() for a, b in zip(now, before, strict=True)]).norm()
        torch.testing.assert_close(moved.item(), 0.5, atol=1e-4, rtol=0)
        before = now


def test_plain_backward_in_a_closure() -> None:
    def run(initialized: bool) -> float:
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        if initialized:
            o2(model, optimizer, dtype=torch.bfloat16)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(6):
            optimizer.step(closure)
        return loss_of(model).item()

    assert run(True) < 2 * run(False) + 0.02


def test_gradients_given_by_hand() -> None:
    model = network()
    optimizer = sgd(model.parameters(), momentum=0)
    o2(model, optimizer)
    wanted = torch.autograd.grad(loss_of(model), list(model.parameters()))
    for p, grad in zip(model.parameters(), wanted, strict=True):
        p.grad = grad
    before = [m.detach().clone() for m in masters(optimizer)]
    optimizer.step()
    for m, old, grad in zip(masters(optimizer), before, wanted, strict=True):
        torch.testing.assert_close(m.detach(), old - 0.1 * grad.float())


def test_gradients_given_to_masters_by_hand() -> None:
    model = network()
    optimizer = sgd(model.parameters(), momentum=0)
    o2(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        before = [m.detach().clone() for m in masters(optimizer)]
        for m in masters(optimizer):
            m.grad = torch.ones_like(m)
        optimizer.step()
        for m, old in zip(masters(optimizer), before, strict=True):
            torch.testing.assert_close(m.detach(), old - 0.1)
    model.zero_grad()
    before = [m.detach().clone() for m in masters(optimizer)]
    optimizer.step()
    assert all(torch.equal(m, old) for m, old in zip(masters(optimizer), before, strict=True))


# -- groups --


@pytest.mark.parametrize("when", ["before", "after"])
def test_add_param_group(when: str) -> None:
    model = network()
    optimizer = sgd(model[0].parameters())
    o2(model, optimizer)
    if when == "after":
        backward(model, optimizer)
        optimizer.step()
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    optimizer.zero_grad()
    assert {p.dtype for p in masters(optimizer)} == {torch.float32}
    before = [p.detach().clone() for p in masters(optimizer)]
    backward(model, optimizer, 1)
    given = grads(optimizer)
    assert None not in given
    optimizer.step()
    for m, old, grad in list(zip(masters(optimizer), before, given, strict=True))[2:]:
        torch.testing.assert_close(m.detach(), old - 0.5 * grad)
    assert all(torch.equal(p, m.half()) for p, m in zip(model.parameters(), masters(optimizer), strict=True))


def test_frozen_and_unfrozen() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    frozen = model[0].weight.detach().clone()
    backward(model, optimizer)
    optimizer.step()
    assert [m.requires_grad for m in masters(optimizer)] == [False, False, True, True]
    assert torch.equal(model[0].weight, frozen)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    optimizer.zero_grad()
    kept = model[2].weight.detach().clone()
    backward(model, optimizer)
    optimizer.step()
    assert [m.requires_grad for m in masters(optimizer)] == [True, True, False, False]
    assert not torch.equal(model[0].weight, frozen)
    assert torch.equal(model[2].weight, kept)


def test_dtypes_mixed_in_a_group() -> None:
    model = nn.ModuleDict({"low": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3), "wide": nn.Linear(3, 1).double()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    o2(model, optimizer)
    double = model["wide"].weight
    assert masters(optimizer)[4] is double
    assert masters(optimizer)[2] is model["norm"].weight
    before = snapshot(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        hidden = model["norm"](model["low"](torch.randn(6, 3).half()).float())
        with autoamp.scale_loss(model["wide"](hidden.double()).pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert double.dtype is torch.float64
    assert double.grad.dtype is torch.float64
    after = snapshot(model, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before[:6], after[:6], strict=True) if a.numel() > 1)


def test_empty_parameters() -> None:
    model = network()
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
    optimizer = torch.optim.Adam(model.parameters())
    o2(model, optimizer)
    with autoamp.scale_loss(loss_of(model) + model.nothing.sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert master_of(model.nothing).shape == (0, 3)
    assert model.state_dict()["nothing"].dtype is torch.float32


def test_sparse_gradients() -> None:
    model = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    o2(model, optimizer)
    before = master_of(model.weight).detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        with autoamp.scale_loss(model(torch.tensor([1, 4, 1])).sum(), optimizer) as scaled:
            scaled.backward()
        assert masters(optimizer)[0].grad.is_sparse
        torch.testing.assert_close(masters(optimizer)[0].grad.to_dense()[1], torch.full((3,), 2.0))
        optimizer.step()
    moved = (master_of(model.weight) != before).any(dim=1)
    assert moved.tolist() == [False, True, False, False, True, False]
    assert torch.equal(model.weight, master_of(model.weight).half())


# -- writes from outside --


def test_a_step_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the one verdict: each read of a value by Python waits for the device."""
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer, loss_scale="dynamic")
    reads = []
    for name in ("item", "tolist", "__bool__"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, f=original, n=name: (reads.append(n), f(self))[1])
    for step in range(3):
        optimizer.zero_grad()
        backward(model, optimizer, step)
        reads.clear()
        optimizer.step()
        assert len(reads) <= 1


# -- state of optimizers --


def test_moments_that_were_there_go_on() -> None:
    def run(initialized_after: int) -> list[Tensor]:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(4):
            if step == initialized_after:
                o2(model, optimizer, dtype=torch.bfloat16, loss_scale=1.0)
            optimizer.zero_grad()
            backward(model, optimizer, step) if step >= initialized_after else loss_of(model, step).backward()
            optimizer.step()
        assert {e["step"].item() for e in optimizer.state.values()} == {4.0}
        assert len(optimizer.state) == 4
        assert all(e["exp_avg"].dtype is torch.float32 for e in optimizer.state.values())
        return [m.detach().clone() for m in masters(optimizer)]

    for got, expected in zip(run(2), run(9), strict=True):
        torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("make", [torch.optim.Adam, lambda p: sgd(p)], ids=["adam", "sgd"])
def test_state_follows_to_every_level_and_back(level: str, make: Any, half: torch.dtype) -> None:
    model = network()
    optimizer = make(model.parameters())
    for opt_level in ("O0", level, "O0", level):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            o2(model, optimizer, opt_level=opt_level, dtype=half, loss_scale=1.0)
        optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
        stepped = half if opt_level == "O3" else torch.float32
        for parameter, entry in optimizer.state.items():
            assert parameter.dtype is stepped
            assert {v.dtype for k, v in entry.items() if k != "step" and isinstance(v, Tensor)} == {stepped}
        assert len(optimizer.state) == 4


def test_fit_state_leaves_what_has_no_state() -> None:
    class Plain:
        param_groups = [{"params": [torch.ones(2)]}]  # noqa: RUF012

    fit_state(Plain())
    optimizer = sgd([torch.ones(2, requires_grad=True)])
    fit_state(optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_kinds_of_adam_agree(flags: dict[str, bool]) -> None:
    def run(**kwargs: bool) -> list[Tensor]:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, **kwargs)
        o2(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, optimizer, step)
            optimizer.step()
        return [m.detach() for m in masters(optimizer)]

    for one, other in zip(run(**flags), run(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("make", [sgd, torch.optim.Adam, torch.optim.AdamW])
def test_a_skipped_step_changes_no_bit(make: Any) -> None:
    model = network()
    optimizer = make(model.parameters())
    o2(model, optimizer, loss_scale="dynamic")
    backward(model, optimizer)
    optimizer.step()
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    backward(model, optimizer, factor=torch.inf)
    optimizer.step()
    assert autoamp.current_handle().last_step_skipped  # type: ignore[union-attr]
    assert equal(snapshot(model, optimizer), before)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert not equal(snapshot(model, optimizer), before)


def test_an_overflow_in_half_gradients_skips() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer, loss_scale=2.0**30)
    autoamp.current_handle().max_consecutive_skips = 2  # type: ignore[union-attr]
    before = snapshot(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    assert equal(snapshot(model, optimizer), before)
    optimizer.zero_grad()
    backward(model, optimizer)
    with pytest.raises(NonFiniteGradientsError):
        optimizer.step()


# -- processes that train together --


def test_distributed_data_parallel(tmp_path: Any) -> None:
    """Its buckets take gradients of the parameter's dtype, also those that are there before a backward pass."""

    def run(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        model = network()
        optimizer = sgd(model.parameters())
        o2(model, optimizer)
        wrapped = wrap(model)
        for step in range(4):
            if step != 2:
                optimizer.zero_grad()
            backward(wrapped, optimizer, step)
            optimizer.step()
        return [m.detach().clone() for m in masters(optimizer)]

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        expected = run(lambda model: model)
        assert equal(run(nn.parallel.DistributedDataParallel), expected)
        views = run(lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))
        assert equal(views, expected)
    finally:
        torch.distributed.destroy_process_group()


# -- the object itself --


def test_the_way_back() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    params = optimizer.param_groups[0]["params"]
    model.half()
    held = MasterWeights(optimizer)
    assert len(held) == 4
    loss_of_half = model(torch.ones(2, 4).half()).sum()
    loss_of_half.backward()
    values = [m.detach().clone() for m in masters(optimizer)]
    held.dissolve()
    assert optimizer.param_groups[0]["params"] is params
    assert params == list(model.parameters())
    assert equal([p.detach() for p in params], values)
    assert {p.grad.dtype for p in params} == {torch.float32}
    assert master_of(params[0]) is None
    assert "zero_grad" not in vars(optimizer)
    assert not params[0]._backward_hooks
    model.double()
    model.zero_grad()
    model(torch.ones(2, 4).double()).sum().backward()
    assert params[0].grad.dtype is torch.float64


def hooked(model: nn.Module) -> list[int]:
    return [len(param._backward_hooks or ()) for param in model.parameters()]


def test_optimizers_that_are_dropped_leave_no_hooks_behind() -> None:
    model = network()
    o2(model, sgd(model.parameters()))
    for _ in range(3):
        optimizer = sgd(model.parameters())
        backward(model, optimizer)
        optimizer.step()
        backward(model, optimizer)
        assert hooked(model) == [1] * 4
    del optimizer
    assert hooked(model) == [0] * 4


def test_passes_outside_of_blocks_add_up_in_fp32() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    o2(model, optimizer, dtype=torch.bfloat16, loss_scale=1.0)
    for step in range(3):
        backward(model, optimizer, step)
        optimizer.step()
        model.zero_grad() if step % 2 else optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    backward(model, optimizer)
    first = [p.grad.clone() for p in model.parameters()]
    loss_of(model, 1).backward()
    second = [p.grad - one for p, one in zip(model.parameters(), first, strict=True)]
    assert {p.grad.dtype for p in (*model.parameters(), *masters(optimizer))} == {torch.float32}
    assert any(torch.count_nonzero(p.grad - p.grad.bfloat16()) for p in masters(optimizer))
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    for p, grad in zip(model.parameters(), second, strict=True):
        torch.testing.assert_close(p.grad.float(), grad, atol=1e-6, rtol=1e-2)


def test_a_pass_in_a_name_that_was_taken_before_is_seen() -> None:
    taken = torch.autograd.backward
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer, dtype=torch.bfloat16, loss_scale=1.0)
    backward(model, optimizer)
    none_on_masters(model, optimizer)
    taken(loss_of(model, 1))
    once = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    assert equal([p.grad for p in model.parameters()], once)


def test_a_model_copies_without_masters_or_hooks() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    backward(model, optimizer)
    twin = copy.deepcopy(model)
    assert master_of(twin[0].weight) is None
    assert not twin[0].weight._backward_hooks
    assert torch.equal(twin[0].weight, model[0].weight)
    backward(model, optimizer)
    optimizer.step()
    assert not torch.equal(twin[0].weight, model[0].weight)


def test_a_copied_optimizer_has_its_own_zero_grad() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    backward(model, optimizer)
    twin = copy.deepcopy(optimizer)
    assert "zero_grad" not in vars(twin)
    twin.zero_grad()
    assert masters(twin)[0].grad is None
    assert masters(optimizer)[0].grad is not None


def test_an_optimizer_without_zero_grad() -> None:
    class Stepper:
        def __init__(self, params: Any) -> None:
            self.param_groups = [{"params": list(params)}]

        def step(self) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad)

    model = network()
    optimizer = Stepper(model.parameters())
    o2(model, optimizer)
    before = masters(optimizer)[0].detach().clone()
    backward(model, optimizer)
    optimizer.step()
    assert not torch.equal(masters(optimizer)[0], before)


def test_half_gradients_go_as_they_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoamp.stepping.masters._SMALL", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 16), nn.Linear(16, 4))
    expected = copy.deepcopy(model)

    class Other(torch.optim.SGD):
        """For all that is known its step may look at all gradients."""

    optimizer = Other(model.parameters(), lr=0.1)
    o2(model, optimizer, dtype=torch.bfloat16)
    held: list[int] = []
    copied = torch._foreach_copy_

    def watched(new: Any, old: Any, *args: Any) -> None:
        if old[0].dtype is torch.bfloat16:
            held.append(sum(p.grad.numel() for p in model.parameters() if p.grad.dtype is torch.bfloat16))  # type: ignore[union-attr]
        copied(new, old, *args)

    monkeypatch.setattr(torch, "_foreach_copy_", watched)
    inputs = torch.randn(8, 6)
    (model(inputs).float().sum() + 0.0).backward()
    optimizer.step()
    # The largest first, and none is there any more when the next one is widened.
    assert held[0] == sum(p.numel() for p in model.parameters())
    assert held[1] == held[0] - 32 * 16
    assert held == sorted(set(held), reverse=True)
    assert held[-1] <= held[0] // 8
    expected(inputs).sum().backward()
    for half, plain in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(master_of(half).grad, plain.grad, rtol=0.05, atol=0.05)  # type: ignore[arg-type,union-attr]


class ClearsModel(torch.optim.SGD):
    """Clears gradients by way of the model, which it was given."""

    model: nn.Module

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_zero_grad_of_its_own_that_clears_the_model_clears_the_masters(set_to_none: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = ClearsModel(model.parameters(), lr=0.1)
    optimizer.model = model
    autoamp.initialize(model, optimizer, opt_level="O2", device_type="cpu", dtype=torch.bfloat16, verbosity=0)
    with autoamp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    for param in (*model.parameters(), *optimizer.param_groups[0]["params"]):
        assert param.grad is None if set_to_none else not param.grad.any()
