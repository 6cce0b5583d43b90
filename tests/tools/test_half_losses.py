"""Losses that no inf shows: swallowed updates, rounded optimizer state, gradients summed in half."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import autoamp
from autoamp.fp16_utils import FP16_Optimizer

# Half units in the last place of weights around 1 are 2**-9 in bf16, 2**-12 in fp16.
STEPS = 20


class Plain(Optimizer):
    """An optimizer of a user's own."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.copy_(self.stepped(param, group["lr"]))

    def stepped(self, param: Tensor, lr: float) -> Tensor:
        return param.float() - lr * param.grad.float()  # type: ignore[union-attr]


class Stochastic(Plain):
    """Rounds stochastically, as torchao's optimizers do."""

    def stepped(self, param: Tensor, lr: float) -> Tensor:
        exact = super().stepped(param, lr)
        below = exact.to(param.dtype).float()
        step = torch.finfo(param.dtype).eps * below.abs()
        return below + step * (torch.rand_like(exact) < (exact - below).abs() / step) * (exact - below).sign()


class OwnMasters(Plain):
    """Keeps fp32 values in its state."""

    def stepped(self, param: Tensor, lr: float) -> Tensor:
        master = self.state[param].setdefault("master", param.detach().float())
        return master.sub_(lr * param.grad.float())  # type: ignore[no-any-return, union-attr]


class Kahan(Plain):
    """Keeps what rounds away, as optimi's optimizers do."""

    def stepped(self, param: Tensor, lr: float) -> Tensor:
        kept = self.state[param].setdefault("kahan_comp", torch.zeros_like(param))
        kept.sub_(lr * param.grad)  # type: ignore[operator]
        after = (param + kept).detach()
        kept.add_(param - after)
        return after


class TopOne(Plain):
    """Moves the element with the largest gradient alone, by its sign."""

    def stepped(self, param: Tensor, lr: float) -> Tensor:
        grad = param.grad.float()  # type: ignore[union-attr]
        return param.float() - lr * grad.sign() * (grad.abs() == grad.abs().max())


class EachFifth(Plain):
    """Steps at each fifth call alone."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % 5 == 0:
            super().step(closure)


class Norm(nn.Module):
    """A norm's weights, whose gradients do not get small, and a matrix."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=dtype))
        self.weight = nn.Parameter(torch.eye(8, dtype=dtype) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale.to(x.dtype)) @ self.weight.to(x.dtype)


OPTIMIZERS: dict[str, Callable[[Any, float], Optimizer]] = {
    "SGD": lambda params, lr: SGD(params, lr),
    "momentum": lambda params, lr: SGD(params, lr / 4, momentum=0.9, nesterov=True),
    "foreach momentum": lambda params, lr: SGD(params, lr / 4, momentum=0.9, foreach=True),
    "fused SGD": lambda params, lr: SGD(params, lr, fused=True),
    "AdamW": lambda params, lr: AdamW(params, lr / 4, eps=1e-4),
    "fused AdamW": lambda params, lr: AdamW(params, lr / 4, eps=1e-4, fused=True),
    "foreach AdamW": lambda params, lr: AdamW(params, lr / 4, eps=1e-4, foreach=True),
    "RMSprop": lambda params, lr: torch.optim.RMSprop(params, lr / 16, eps=1e-4),
    "own": Plain,
}


def recording_handle(half: torch.dtype) -> autoamp.Handle:
    """Make a handle with few rules, which takes less time."""
    lists = {"extends": [], "fp16": ["matmul"], "fp32": [], "promote": [], "none": []}
    return autoamp.init(device_type="cpu", dtype=half, scope="modules", lists=lists)  # type: ignore[return-value]


@pytest.fixture
def record() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Records from the start of the test on, and returns the rows of the report."""
    handle = recording_handle(torch.bfloat16)
    handle.record()
    yield lambda: handle.report()["half_losses"]
    handle.deactivate()


def train(
    model: nn.Module, optimizer: Optimizer, steps: int = STEPS, *, passes: int = 1,
    factor: Callable[[int], float] = lambda step: 1.0, closure: bool = False,
) -> None:  # fmt: skip
    """Train by the mean of the outputs, whose gradients stay as large as they are."""
    dtype = next(model.parameters()).dtype

    def loss(step: int) -> Tensor:
        optimizer.zero_grad()
        for _ in range(passes):
            out = model(torch.ones(2, 8, dtype=dtype)).float().mean() * factor(step)
            out.backward()
        return out.detach()  # type: ignore[no-any-return]

    for step in range(1, steps + 1):
        if closure:
            optimizer.step(functools.partial(loss, step))  # type: ignore[arg-type]
        else:
            loss(step)
            optimizer.step()


def small(dtype: torch.dtype) -> float:
    """Return a learning rate by which each update of `Norm` rounds away."""
    return 1e-4 if dtype is torch.bfloat16 else 1e-5


@pytest.mark.parametrize(
    ("name", "closure"), [*((name, False) for name in OPTIMIZERS), ("momentum", True), ("own", True)]
)
def test_swallowed_updates_are_told_once(name: str, half: torch.dtype, record: Any, closure: bool) -> None:
    model = Norm(half)
    before = {key: value.clone() for key, value in model.named_parameters()}
    optimizer = OPTIMIZERS[name](model.parameters(), small(half))
    with pytest.warns(UserWarning, match=r"Norm\.scale, Norm\.weight") as told:
        train(model, optimizer, closure=closure)
    assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())
    (row,) = record()
    (text,) = [str(one.message) for one in told]
    assert (row["kind"], row["optimizer"], row["group"], row["step"]) == ("updates", type(optimizer).__name__, 0, 16)
    assert all(remedy in text for remedy in ('opt_level="O2"', "bf16_stochastic_round", "kahan_sum"))
    assert told[0].filename == __file__
    assert ("1/512 of a weight" if half is torch.bfloat16 else "1/4096 of a weight") in text
    if name != "own":
        assert (
            "changed no bit of 100.0% of the elements with a gradient in group 0, and in fp32 of 0.0%"
            in row["sentence"]
        )


def test_groups_and_parameters_that_move_are_not_named(half: torch.dtype, record: Any) -> None:
    model, other = Norm(half), Norm(half)
    groups = [{"params": model.parameters()}, {"params": other.parameters(), "lr": 0.1}]
    both = nn.Sequential(model, other)
    with pytest.warns(UserWarning, match=r"group 0"):
        train(both, SGD(groups, small(half)))
    assert [row["group"] for row in record()] == [0]


def converged(model: nn.Module, lr: float, half: torch.dtype) -> Any:
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2.0**-14)
    return SGD(model.parameters(), lr * 1e-2)


def warming_up(model: nn.Module, lr: float, half: torch.dtype) -> Any:
    optimizer = SGD(model.parameters(), lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def ending(model: nn.Module, lr: float, half: torch.dtype) -> Any:
    optimizer = SGD(model.parameters(), 0.25)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 10 else 1e-4)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def partly(model: nn.Module, lr: float, half: torch.dtype) -> Any:
    # What is 0 moves by any update.
    nn.init.zeros_(model.weight)
    return Plain(model.parameters(), lr)


def frozen(model: nn.Module, lr: float, half: torch.dtype) -> Any:
    model.scale.requires_grad_(False)
    return SGD(model.parameters(), 0.25)


def flagged(model: nn.Module, lr: float, **flags: float) -> Any:
    """Return a fused optimizer, as a scaler that left unscaling and skipping to it calls it."""
    optimizer = AdamW(model.parameters(), lr, eps=1e-4, fused=True)
    vars(optimizer).update({name: torch.tensor(value) for name, value in flags.items()})
    return optimizer


CLEAN: dict[str, Callable[[nn.Module, float, torch.dtype], Any]] = {
    "moves": lambda model, lr, half: SGD(model.parameters(), 0.25),
    "lr 0": lambda model, lr, half: SGD(model.parameters(), 0.0),
    "own at lr 0": lambda model, lr, half: Plain(model.parameters(), 0.0),
    "warm-up": warming_up,
    "end": ending,
    "converged": converged,
    "frozen": frozen,
    "own and partly": partly,
    "stochastic": lambda model, lr, half: Stochastic(model.parameters(), lr * 4),
    "masters in the state": lambda model, lr, half: OwnMasters(model.parameters(), lr),
    "Kahan": lambda model, lr, half: Kahan(model.parameters(), lr),
    "sparse signs": lambda model, lr, half: TopOne(model.parameters(), 0.1),
    "each fifth": lambda model, lr, half: EachFifth(model.parameters(), 0.25),
    "FP16_Optimizer": lambda model, lr, half: FP16_Optimizer(SGD(model.parameters(), lr), verbose=False),
    "a fused step that skips": lambda model, lr, half: flagged(model, lr, found_inf=1.0),
    "a fused step that unscales": lambda model, lr, half: flagged(model, lr, found_inf=0.0, grad_scale=1024.0),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_programs_are_left_alone(name: str, half: torch.dtype, record: Any) -> None:
    model = Norm(half)
    optimizer = CLEAN[name](model, small(half), half)
    train(model, optimizer)
    assert record() == []


@pytest.mark.parametrize("hook", ["of the sum", "of the gradient", "of the step"])
def test_gradients_that_hooks_of_the_program_change_are_not_lost(hook: str, half: torch.dtype, record: Any) -> None:
    model = Norm(half)
    optimizer = SGD(model.parameters(), 0.25)

    def zero(*_: Any) -> None:
        model.weight.grad.zero_()  # type: ignore[union-attr]

    def shrink(param: Tensor) -> None:
        param.grad.mul_(0.25)  # type: ignore[union-attr]

    if hook == "of the step":
        optimizer.register_step_pre_hook(zero)
    train(model, optimizer, 3, passes=2)
    if hook == "of the sum":
        model.scale.register_post_accumulate_grad_hook(shrink)
    elif hook == "of the gradient":
        model.scale.register_hook(lambda grad: grad * 0.25)
    train(model, optimizer, passes=2)
    assert record() == []


def test_a_step_that_calls_that_of_its_base_is_one_step(half: torch.dtype, record: Any) -> None:
    class Derived(SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.zero_grad()

    # Torch lets hooks run around the steps of all classes that have had an instance.
    model, _ = Norm(half), SGD(Norm(half).parameters(), 1.0)
    optimizer = Derived(model.parameters(), small(half))
    train(model, optimizer, 15)
    assert record() == []
    with pytest.warns(UserWarning, match=r"from step 4 to step 16 of Derived"):
        train(model, optimizer, 1)


def test_a_closure_makes_the_gradients_of_its_step(half: torch.dtype, record: Any) -> None:
    model = Norm(half)
    # Those of sampled steps are 0.
    train(model, SGD(model.parameters(), small(half)), closure=True, factor=lambda step: float(step not in (1, 4, 16)))
    assert record() == []


def test_fp32_and_o2_are_left_alone(half: torch.dtype) -> None:
    for level in ("O0", "O2"):
        model = nn.Linear(8, 8)
        optimizer = AdamW(model.parameters(), 1e-6)
        model, optimizer = autoamp.initialize(
            model, optimizer, opt_level=level, dtype=half, device_type="cpu", verbosity=0, loss_scale=1.0
        )
        handle = autoamp.current_handle()
        handle.record()
        for _ in range(STEPS):
            for _ in range(4):
                with autoamp.scale_loss(model(torch.ones(2, 8)).float().mean(), optimizer) as loss:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        assert handle.report()["half_losses"] == []
        handle.deactivate()


# -- gradients summed in half --


class Part(nn.Module):
    """Gives its parameter a gradient as large as its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.bias * x).sum()


def accumulate(half: torch.dtype, count: int, later: float, *, zero: bool = False) -> tuple[Tensor, Tensor]:
    """Train by a gradient of 1 and then smaller ones in each step; return the last gradient, and what it should be."""
    model = Part(half)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad(set_to_none=not zero)
        for number in range(count):
            model(torch.full((8,), 1.0 if number == 0 else later, dtype=half)).backward()
        grad = model.bias.grad.float()  # type: ignore[union-attr]
        optimizer.step()
    return grad, torch.full((8,), 1.0 + (count - 1) * float(torch.tensor(later, dtype=half)))


@pytest.mark.parametrize("zero", [False, True], ids=["none", "zeros"])
def test_gradients_that_are_swallowed_by_a_sum_are_told(half: torch.dtype, record: Any, zero: bool) -> None:
    count = 17 if half is torch.bfloat16 else 129
    with pytest.warns(UserWarning, match=f"of Part.bias was lost as {count} backward passes added it up") as told:
        grad, exact = accumulate(half, count, 2.0**-9 if half is torch.bfloat16 else 2.0**-12, zero=zero)
    lost = float((exact - grad).norm() / exact.norm())
    assert lost > 0.03
    (row,) = record()
    assert (row["kind"], row["step"], row["group"]) == ("gradient sums", 4, None)
    assert row["sentence"].startswith(f"{lost:.1%} of the gradient")
    assert 'opt_level="O2"' in str(told[0].message)


@pytest.mark.parametrize(("count", "later"), [(1, 1.0), (16, 1.0), (16, 0.37)])
def test_sums_that_round_as_usual_are_not_told(half: torch.dtype, record: Any, count: int, later: float) -> None:
    accumulate(half, count, later)
    assert record() == []


@pytest.mark.parametrize("zero", [False, True], ids=["none", "zeros"])
def test_a_sum_that_was_dropped_is_not_told(half: torch.dtype, record: Any, zero: bool) -> None:
    model = Part(half)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(5):
        for values in ([1.0] + [2.0**-12] * 256, [2.0**-9, 2.0**-9]):
            optimizer.zero_grad(set_to_none=not zero)
            for value in values:
                model(torch.full((8,), value, dtype=half)).backward()
        optimizer.step()
    assert record() == []


# -- optimizer state --


class Moments(Plain):
    """Keeps fp32 moments of half parameters."""

    def stepped(self, param: Tensor, lr: float) -> Tensor:
        moment = self.state[param].setdefault("moment", torch.zeros_like(param, dtype=torch.float32))
        moment.mul_(0.7).add_(param.grad, alpha=0.3)  # type: ignore[arg-type]
        return param.float() - lr * moment.float()


class Restores(Moments):
    """Puts its state back."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for param, state in zip(self.param_groups[0]["params"], state_dict["state"].values(), strict=True):
            self.state[param]["moment"] = state["moment"].clone()


def loads(kind: Any, half: torch.dtype) -> None:
    saved, model = Norm(half), Norm(half)
    first, second = kind(saved.parameters(), 0.25), kind(model.parameters(), 0.25)
    train(saved, first, 3)
    second.load_state_dict(first.state_dict())
    train(model, second, 1)


def test_recast_state_is_told_at_the_load(half: torch.dtype, record: Any) -> None:
    with pytest.warns(UserWarning, match=r"of Moments rounded moment of Norm.scale, Norm.weight") as told:
        loads(Moments, half)
    (row,) = record()
    assert (row["kind"], row["step"]) == ("optimizer state", 0)
    assert "second.load_state_dict" in Path(__file__).read_text(encoding="utf-8").splitlines()[told[0].lineno - 1]
    assert "optimizer.state afterwards" in str(told[0].message)


@pytest.mark.parametrize("kind", [Restores, AdamW], ids=["restored", "half"])
def test_state_that_loses_nothing_is_not_told(kind: Any, half: torch.dtype, record: Any) -> None:
    loads(kind, half)
    assert record() == []


# -- what it leaves --


@pytest.mark.parametrize("name", ["momentum", "fp32 momentum", "fused AdamW", "own"])
def test_nothing_changes(name: str, half: torch.dtype) -> None:
    def trained(recorded: bool) -> list[Any]:
        handle = recording_handle(half)
        recording = handle.record() if recorded else None
        model = Norm(half)
        optimizer = OPTIMIZERS[name.removeprefix("fp32 ")](model.parameters(), small(half))
        for param in model.parameters() if name == "fp32 momentum" else ():
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, passes=3)
            optimizer.load_state_dict(optimizer.state_dict())
        assert recording is None or recording.half_losses.rows
        handle.deactivate()
        state = [value for one in optimizer.state.values() for value in one.values()]
        grads = [param.grad for param in model.parameters()]
        hooks = [param._backward_hooks for param in model.parameters()]
        assert not any(hooks)
        return [*model.parameters(), *model.buffers(), *grads, *state, torch.get_rng_state()]

    assert all(torch.equal(one, other) for one, other in zip(trained(True), trained(False), strict=True))


def test_the_end_of_a_recording_takes_all_hooks_back() -> None:
    load = Optimizer.load_state_dict
    handle = recording_handle(torch.bfloat16)
    model = Norm(torch.bfloat16)
    optimizer = SGD(model.parameters(), 0.25)
    with handle.record():
        train(model, optimizer, 3)
        assert model.scale._backward_hooks
        assert Optimizer.load_state_dict is not load
    assert not model.scale._backward_hooks
    assert Optimizer.load_state_dict is load
    with handle.record(sample=False):
        # `--fail-on` needs no samples.
        assert Optimizer.load_state_dict is load


def test_a_failing_look_does_not_end_the_program(half: torch.dtype, record: Any) -> None:
    class Strange(Plain):
        state = None  # type: ignore[assignment]

        def step(self, closure: Any = None) -> None:
            self.state = None

    model = Norm(half)
    train(model, Strange(model.parameters(), 0.1))
    assert record() == []


def test_fp32_values_that_half_precision_has_are_not_told(half: torch.dtype, record: Any) -> None:
    model = Norm(half)
    optimizer = Moments(model.parameters(), 0.25)
    state = {"state": {0: {"moment": torch.ones(8)}}, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict(state)
    assert optimizer.state[model.scale]["moment"].dtype is half
    assert record() == []
