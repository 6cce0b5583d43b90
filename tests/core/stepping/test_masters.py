"""Master weights: gradients on both sides, groups, the state of optimizers, copies, and the way back."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

import autoamp
from autoamp.core import MasterWeights, fit_state, master_of
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.optimizers import FusedSGD
from tests.core.stepping.networks import backward, data, equal, grads, loss_of, masters, network, o2, sgd, snapshot

# -- values --


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_no_wrapper_keeps_equal_begin_with_what_halves_hold(
    ranks: int, fake_ranks: Callable[[int], None]
) -> None:
    """Collectives copy half parameters to other ranks, which have other low bits in their masters."""
    fake_ranks(ranks)
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    o2(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    assert equal(masters(optimizer), before if ranks == 1 else [b.half().float() for b in before])


class Copies(TorchDispatchMode):
    """Notes how many elements each multi-tensor copy writes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_foreach_copy_":
            self.elements.append(sum(tensor.numel() for tensor in args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        # Few elements are one part. Of many each part is half of what is left, the largest first.
        ([2**15, 2**16], [3 * 2**15]), ([2**18], [2**18]), ([2**16] * 4, [2**17, 2**17]),
        ([90000, 300, 90000, 90000], [90000, 90000, 90300]),
    ],
)  # fmt: skip
def test_half_gradients_are_cast_in_parts_so_that_few_are_there_twice(sizes: list[int], parts: list[int]) -> None:
    # As on a GPU.
    params = [nn.Parameter(torch.zeros(size, dtype=torch.float16, device="meta")) for size in sizes]
    optimizer = torch.optim.SGD(params, lr=0.5)
    masters = MasterWeights(optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    with Copies() as copies:
        masters.collect()
    assert copies.elements == parts
    assert all(param.grad is not None and param.grad.dtype is torch.float32 for param in params)


class Casts(TorchDispatchMode):
    """Notes how many half gradients are there at each cast."""

    def __init__(self, gradients: list[Any]) -> None:
        super().__init__()
        self._gradients = list(map(TensorWeakRef, gradients))
        self.alive: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.alive.append(sum(reference() is not None for reference in self._gradients))
        return func(*args, **(kwargs or {}))


def test_on_a_cpu_each_half_gradient_is_freed_before_the_next_is_cast() -> None:
    params = [nn.Parameter(torch.zeros(4, dtype=torch.float16)) for _ in range(4)]
    optimizer = torch.optim.SGD(params, lr=0.5)
    masters = MasterWeights(optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    with Casts([param.grad for param in params]) as casts:
        masters.collect()
    assert casts.alive == [4, 3, 2, 1]
    assert all(param.grad is not None and param.grad.dtype is torch.float32 for param in params)


# -- gradients. Most ways to read, write and clear them: tests/property --

Trained = tuple[nn.Parameter, Any, Callable[[], None]]


def trained(way: str = "O2", make: Any = torch.optim.SGD) -> Trained:
    """Return a parameter of 4 ones, its optimizer, and a pass that gives each of them the gradient 0.25."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    inputs = torch.full((1, 4), 0.25)
    optimizer = make(model.parameters(), lr=1.0)
    if way == "FP16_Optimizer":
        model.half()
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)
        return model.weight, optimizer, lambda: optimizer.backward(model(inputs.half()).float().sum())
    o2(model, optimizer, loss_scale=128.0)

    def backward() -> None:
        with autoamp.scale_loss(model(inputs).sum(), optimizer) as scaled:
            scaled.backward()

    return model.weight, optimizer, backward


@pytest.mark.parametrize("way", ["O2", "FP16_Optimizer"])
def test_the_gradient_after_a_block_is_a_plain_tensor_of_both(way: str) -> None:
    param, optimizer, backward = trained(way)
    backward()
    assert type(param.grad) is Tensor
    assert param.grad is optimizer.param_groups[0]["params"][0].grad
    other = torch.zeros(1, 4)
    other.data = param.grad
    assert other.tolist() == [[0.25] * 4]


def test_zero_grad_frees_the_gradients_of_half_parameters() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    for run in (lambda: backward(model, optimizer), lambda: loss_of(model).backward()):
        run()
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in model.parameters())
        optimizer.zero_grad()
        assert [p.grad for p in model.parameters()] == [None] * 4


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_a_cleared_gradient_is_not_stepped(make: Any) -> None:
    param, optimizer, backward = trained(make=make)
    backward()
    param.grad = None
    optimizer.step()
    assert param.tolist() == [[1.0] * 4]
    backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    param.requires_grad_(False)
    param.grad = None
    optimizer.step()
    assert param.tolist() == [[0.75] * 4]


def test_a_replaced_gradient_of_a_master_is_stepped_and_goes_with_that_of_the_parameter() -> None:
    param, optimizer, backward = trained()
    (master,) = optimizer.param_groups[0]["params"]
    backward()
    kept, master.grad = master.grad, torch.full((1, 4), 0.5)
    optimizer.step()
    assert param.tolist() == [[0.5] * 4]
    backward()
    master.grad = torch.full((1, 4), 0.5)
    param.grad = None
    backward()
    assert param.grad is not None
    assert param.grad.tolist() == master.grad.tolist() == [[0.25] * 4]
    optimizer.zero_grad()
    param.grad = kept
    optimizer.step()
    assert param.tolist() == [[0.25] * 4]


class Clamping(torch.optim.SGD):
    """Clamps gradients in its step into new tensors."""

    def step(self, closure: Any = None) -> Any:
        for param in masters(self):
            param.grad = None if param.grad is None else param.grad.clamp(max=0.0625)
        return super().step(closure)


@pytest.mark.parametrize("way", ["O2", "FP16_Optimizer"])
def test_a_gradient_that_the_optimizer_replaces_in_its_step_is_stepped_and_cleared_at_the_model(way: str) -> None:
    param, optimizer, backward = trained(way, make=Clamping)
    for _ in range(2):
        backward()
        optimizer.step()
        param.grad = None
    assert param.tolist() == [[0.875] * 4]


def test_an_fp16_optimizer_goes_by_a_replaced_gradient() -> None:
    param, optimizer, backward = trained("FP16_Optimizer")
    backward()
    param.grad = torch.full((1, 4), 100.0)
    assert optimizer.inspect_master_grad_data()[0][0].tolist() == [[100.0] * 4]
    assert optimizer.clip_master_grads(1.0) == pytest.approx(200.0)
    optimizer.step()
    assert param.tolist()[0] == pytest.approx([0.5] * 4, abs=1e-3)


def test_parameters_that_a_loss_does_not_reach_keep_no_old_gradient() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    for master in masters(optimizer):
        master.grad = None
    with autoamp.scale_loss(model[0](data()[0].half()).sum(), optimizer) as scaled:
        scaled.backward()
    assert [g is None for g in grads(optimizer)] == [False, False, True, True]


def test_gradients_of_a_plain_backward_pass_are_clipped_at_the_masters() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=1.0, momentum=0)
    o2(model, optimizer, dtype=torch.bfloat16, loss_scale=1.0)
    for _ in range(2):
        before = [p.detach().clone() for p in masters(optimizer)]
        optimizer.zero_grad()
        (loss_of(model) * 100).backward()
        assert nn.utils.clip_grad_norm_(autoamp.master_params(optimizer), 0.5) > 1.0
        optimizer.step()
        moved = torch.cat([(a - b).flatten() for a, b in zip(masters(optimizer), before, strict=True)]).norm()
        torch.testing.assert_close(moved.item(), 0.5, atol=1e-4, rtol=0)


def test_a_closure_may_run_a_plain_backward_pass() -> None:
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


def test_passes_outside_of_blocks_add_up_in_fp32() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer, dtype=torch.bfloat16, loss_scale=1.0)
    found = []
    for seeds in ((0,), (1,), (0, 1)):
        optimizer.zero_grad()
        backward(model, optimizer, seeds[0])
        for seed in seeds[1:]:
            loss_of(model, seed).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert {p.grad.dtype for p in (*model.parameters(), *masters(optimizer))} == {torch.float32}
    for one, other, both in zip(*found, strict=True):
        torch.testing.assert_close(one + other, both)
    assert any(torch.count_nonzero(grad - grad.bfloat16()) for grad in found[2])


@pytest.mark.parametrize("side", ["model", "masters", "both"])
def test_gradients_given_by_hand_are_stepped(side: str) -> None:
    model = network()
    optimizer = sgd(model.parameters(), momentum=0)
    o2(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        before = [m.detach().clone() for m in masters(optimizer)]
        for p, m in zip(model.parameters(), masters(optimizer), strict=True):
            grad = torch.ones_like(p if side == "model" else m)
            p.grad = grad if side != "masters" else p.grad
            m.grad = grad if side != "model" else m.grad
        optimizer.step()
        for m, old in zip(masters(optimizer), before, strict=True):
            torch.testing.assert_close(m.detach(), old - 0.1)
    model.zero_grad()
    before = [m.detach().clone() for m in masters(optimizer)]
    optimizer.step()
    assert equal([m.detach() for m in masters(optimizer)], before)


class ClearsModel(torch.optim.SGD):
    """Clears gradients by way of the model, which it was given."""

    model: nn.Module

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_zero_grad_of_its_own_that_clears_the_model_clears_the_masters(set_to_none: bool) -> None:
    model = network()
    optimizer = ClearsModel(model.parameters(), lr=0.1)
    optimizer.model = model
    o2(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    for param in (*model.parameters(), *masters(optimizer)):
        assert param.grad is None if set_to_none else not param.grad.any()


# -- groups. Groups that are added and parameters that are frozen: tests/property --


def test_a_group_may_mix_dtypes() -> None:
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
    assert double.dtype is double.grad.dtype is torch.float64
    after = snapshot(model, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before[:6], after[:6], strict=True) if a.numel() > 1)


def test_empty_parameters_have_masters() -> None:
    model = network()
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
    optimizer = torch.optim.Adam(model.parameters())
    o2(model, optimizer)
    with autoamp.scale_loss(loss_of(model) + model.nothing.sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert master_of(model.nothing).shape == (0, 3)
    assert model.state_dict()["nothing"].dtype is torch.float32


def test_sparse_gradients_step_the_rows_of_masters() -> None:
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


def test_masters_train_under_distributed_data_parallel(one_process: None) -> None:
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

    expected = run(lambda model: model)
    assert equal(run(DistributedDataParallel), expected)
    assert equal(run(lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True)), expected)


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
@pytest.mark.parametrize("make", [torch.optim.Adam, sgd], ids=["adam", "sgd"])
def test_state_follows_to_every_level_and_back(level: str, make: Any) -> None:
    model, half = network(), torch.bfloat16
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


def test_an_optimizer_without_zero_grad_or_state() -> None:
    class Stepper:
        def __init__(self, params: Any) -> None:
            self.param_groups = [{"params": list(params)}]

        def step(self) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad)

    model = network()
    optimizer = Stepper(model.parameters())
    fit_state(optimizer)
    o2(model, optimizer)
    before = masters(optimizer)[0].detach().clone()
    backward(model, optimizer)
    optimizer.step()
    assert not torch.equal(masters(optimizer)[0], before)


# -- copies, and the way back --


def test_dissolved_masters_leave_fp32_parameters_in_the_optimizer() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    params = optimizer.param_groups[0]["params"]
    model.half()
    held = MasterWeights(optimizer)
    assert len(held) == 4
    model(torch.ones(2, 4).half()).sum().backward()
    values = [m.detach().clone() for m in masters(optimizer)]
    held.undo()
    assert optimizer.param_groups[0]["params"] is params
    assert params == list(model.parameters())
    assert equal([p.detach() for p in params], values)
    assert {p.grad.dtype for p in params} == {torch.float32}
    assert master_of(params[0]) is None
    assert "zero_grad" not in vars(optimizer)
    assert hooked(model) == [0] * 4
    model.double()
    model.zero_grad()
    model(torch.ones(2, 4).double()).sum().backward()
    assert params[0].grad.dtype is torch.float64


def hooked(model: nn.Module) -> list[int]:
    """Return how many hooks each parameter has."""
    return [len(param._backward_hooks or ()) for param in model.parameters()]


def run_in_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def drop(optimizer: Any, how: str) -> None:
    """Clear the gradients of the masters alone, as scripts do by ``amp.master_params(optimizer)``."""
    for master in masters(optimizer):
        if how == "none":
            master.grad = None
        elif how == "zeros in place":
            master.grad.zero_()
        else:
            master.grad = torch.zeros_like(master)


def compiled(loss: Tensor) -> None:
    torch.compile(lambda: loss.backward(), backend="eager")()


def in_a_region(loss: Tensor) -> None:
    with autoamp.region(device_type="cpu", dtype=torch.bfloat16):
        loss.backward()


PASSES: dict[str, Callable[[Tensor], None]] = {
    "plain": lambda loss: loss.backward(), "compiled": compiled, "in a region": in_a_region,
    "several roots": lambda loss: torch.autograd.backward([loss, 0.0 * loss]),
    "in a thread": lambda loss: run_in_thread(loss.backward),
}  # fmt: skip


@pytest.mark.parametrize("how", ["none", "zeros in place", "other zeros"])
@pytest.mark.parametrize("way", [*PASSES, "in a block", "FP16_Optimizer", "FP16_Optimizer, plain"])
def test_a_pass_begins_from_nothing_where_the_gradients_of_masters_were_dropped(way: str, how: str) -> None:
    torch._dynamo.reset()
    model = network()
    optimizer: Any = sgd(model.parameters(), lr=0.0)
    if "FP16" in way:
        optimizer = FP16_Optimizer(sgd(model.half().parameters(), lr=0.0))
    else:
        o2(model, optimizer, loss_scale=1.0)

    def one_pass(seed: int, before: Callable[[], None] = lambda: None) -> None:
        loss = mse_loss(model(data(seed)[0].to(model[0].weight.dtype)).float(), data(seed)[1])
        if way == "FP16_Optimizer":
            before()
            optimizer.backward(loss)
        elif way in PASSES or "plain" in way:
            before()
            PASSES.get(way, Tensor.backward)(loss)
        else:
            with autoamp.scale_loss(loss, optimizer) as scaled:
                before()
                scaled.backward()

    one_pass(1)
    optimizer.step()
    expected = grads(optimizer)
    for seed in (0, 1):
        one_pass(seed, lambda: drop(optimizer, how))
        optimizer.step()
    assert equal(grads(optimizer), expected)


def test_two_fp16_optimizers_of_one_loss_begin_from_nothing_where_masters_were_dropped() -> None:
    first, second = nn.Linear(4, 4).half(), nn.Linear(4, 2).half()
    one, other = (FP16_Optimizer(sgd(part.parameters(), lr=0.0)) for part in (first, second))
    found = []
    for _ in range(3):
        drop(one, "none")
        drop(other, "none")
        one.backward(second(first(data()[0].half())).float().square().mean())
        one.step()
        other.step()
        found.append([*grads(one), *grads(other)])
    assert all(equal(found[0], later) for later in found[1:])
    assert None not in found[0]


@pytest.mark.parametrize("after", [None, 2.0])
def test_a_pass_of_something_else_leaves_what_is_written_to_masters_the_programs(after: float | None) -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=1.0, momentum=0.0)
    o2(model, optimizer, dtype=torch.bfloat16, loss_scale=1.0)
    backward(model, optimizer)
    optimizer.step()
    master = masters(optimizer)[0]
    master.grad = torch.ones_like(master)
    (torch.ones(1, requires_grad=True) * 2).sum().backward()
    master.grad = None if after is None else torch.full_like(master, after)
    before = master.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - master.detach(), torch.full_like(before, after or 0.0))


def test_a_gradient_set_at_a_master_is_added_to_by_a_plain_pass() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.0)
    o2(model, optimizer, dtype=torch.bfloat16, loss_scale=1.0)
    loss_of(model).backward()
    optimizer.step()
    expected = [None if grad is None else grad + 1.0 for grad in grads(optimizer)]
    optimizer.zero_grad()
    for master in masters(optimizer):
        master.grad = torch.ones_like(master)
    loss_of(model).backward()
    optimizer.step()
    for grad, wanted in zip(grads(optimizer), expected, strict=True):
        torch.testing.assert_close(grad, wanted)


def test_a_pass_of_another_thread_in_the_middle_keeps_gradients() -> None:
    """The pass begins at each instruction of the function that gives both sides their gradient, at one at a time."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model.parameters())
    o2(model, optimizer, dtype=torch.bfloat16, loss_scale=1.0)
    count = 0

    def switch(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_name != "_share":
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if event == "opcode" and count == number:
            sys.settrace(None)
            run_in_thread(lambda: (torch.ones(1, requires_grad=True) * 2).sum().backward())
        return switch

    for number in range(1, 50):
        optimizer.zero_grad()
        count = 0
        with autoamp.scale_loss(model(torch.ones(1, 2)).square().sum(), optimizer) as scaled:
            scaled.backward()
            sys.settrace(switch)
        sys.settrace(None)
        assert all(param.grad is not None for param in (*model.parameters(), *masters(optimizer))), number
    assert count < number


def test_an_fp16_optimizer_has_a_hook_at_each_parameter_as_long_as_it_lives() -> None:
    model = network().half()
    for _ in range(3):
        optimizer = FP16_Optimizer(sgd(model.parameters()))
        for _ in range(2):
            optimizer.backward(model(data()[0].half()).float().square().mean())
            optimizer.step()
        assert hooked(model) == [1] * 4
    del optimizer
    gc.collect()
    assert hooked(model) == [0] * 4


def test_masters_put_no_hooks_at_parameters() -> None:
    model = network()
    o2(model, sgd(model.parameters()))
    for _ in range(3):
        optimizer = sgd(model.parameters())
        for _ in range(2):
            backward(model, optimizer)
            optimizer.step()
        assert hooked(model) == [0] * 4


def test_a_copied_model_has_no_masters_and_a_copied_optimizer_its_own_zero_grad() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    backward(model, optimizer)
    twin, other = copy.deepcopy(model), copy.deepcopy(optimizer)
    assert master_of(twin[0].weight) is None
    assert hooked(twin) == [0] * 4
    assert torch.equal(twin[0].weight, model[0].weight)
    other.zero_grad()
    assert masters(other)[0].grad is None
    assert masters(optimizer)[0].grad is not None
    optimizer.step()
    assert not torch.equal(twin[0].weight, model[0].weight)


def test_a_gradient_of_zeros_is_no_cleared_one() -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = autoamp.initialize(
        model, optimizer, opt_level="O2", dtype=torch.float16, device_type="cpu", verbosity=0
    )

    def backward() -> None:
        with autoamp.scale_loss(model(torch.ones(1, 2)).float().sum() * 0, optimizer) as scaled:
            scaled.backward()

    backward()
    masters = list(autoamp.master_params(optimizer))
    before, own = [master.detach().clone() for master in masters], torch.ones(2, 2)
    masters[0].grad = own
    backward()
    optimizer.step()
    assert torch.equal(masters[0], before[0] - 0.5)
    assert own.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_what_is_kept_at_parameters_is_at_their_masters_too() -> None:
    """By such attributes optimizers choose rates. Numbers and strings alone: others may lead to the model."""
    model = network()
    for param in model.parameters():
        param.rate, param.owner = 0.5, model  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autoamp.initialize(model, optimizer, opt_level="O2", dtype=torch.float16, device_type="cpu", verbosity=0)
    stepped: list[Any] = [param for group in optimizer.param_groups for param in group["params"]]
    assert [param.rate for param in stepped] == [0.5] * len(stepped)
    assert not any(hasattr(param, "owner") for param in stepped)
    first: Any = next(model.parameters())
    assert first is not stepped[0]
    seen = weakref.ref(first)
    del model, optimizer, param, stepped, first
    gc.collect()
    assert seen() is None


def test_a_compiled_optimizer_step_at_o2_trains() -> None:
    """Dynamo's own notes at a master say nothing of its half parameter."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"dtype": torch.float16, "device_type": "cpu", "verbosity": 0, "loss_scale": 128.0}
    autoamp.initialize(model, optimizer, opt_level="O2", **options)
    step = torch.compile(optimizer.step, backend="eager")
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        inputs = torch.ones(2, next(model.parameters()).shape[1])
        with autoamp.scale_loss(model(inputs).float().sum(), optimizer) as scaled:
            scaled.backward()
        step()
    assert not any(map(torch.equal, before, model.parameters()))
