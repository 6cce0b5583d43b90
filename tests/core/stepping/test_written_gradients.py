"""A step uses gradients that were checked as they are: what is written after a check is checked again."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Sequential
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.optimizers import FusedAdam

Params = Sequence[Tensor]


class Program:
    """A model in fp16, and one step of its training in two halves: gradients, and ``optimizer.step()``."""

    def __init__(self, way: str, make: Callable[..., Any] = torch.optim.SGD, **options: Any) -> None:
        torch.manual_seed(0)
        self.sparse = make is torch.optim.SparseAdam
        self.model: Module = Embedding(8, 4, sparse=True) if self.sparse else Sequential(Linear(4, 4), Linear(4, 4))
        self.optimizer: Any = make(self.model.parameters(), lr=0.01)
        self.way = way
        if way in ("O2", "scale_loss", "bf16 with a scale"):
            level, dtype = "O2" if way == "O2" else "O1", torch.bfloat16 if way.startswith("bf16") else torch.float16
            scale = 128.0 if way.startswith("bf16") else None
            self.model, self.optimizer = autoamp.initialize(
                self.model, self.optimizer, opt_level=level, dtype=dtype, device_type="cpu", loss_scale=scale,
                verbosity=0, **options,
            )  # fmt: skip
        elif way == "auto_scale":
            autoamp.init(device_type="cpu", dtype=torch.float16, **options).auto_scale()
        else:
            self.model.half()
            self.optimizer = FP16_Optimizer(self.optimizer, dynamic_loss_scale=True)

    @property
    def params(self) -> list[Tensor]:
        """What the optimizer steps."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def backward(self) -> None:
        inputs = torch.arange(4) if self.sparse else torch.ones(2, 4)
        if self.way == "FP16_Optimizer" and not self.sparse:
            inputs = inputs.half()
        loss = self.model(inputs).float().square().mean()
        if self.way == "auto_scale":
            loss.backward()
        elif self.way == "FP16_Optimizer":
            self.optimizer.backward(loss)
        else:
            with autoamp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()

    def state(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [torch.as_tensor(value).detach().clone() for value in (*self.params, *self.model.parameters(), *states)]

    def skips(self, spoil: Callable[[Params], None]) -> bool:
        """Whether a step is skipped, with all as before it, after a clean one, and the next one is taken."""
        for _ in range(2):
            self.optimizer.zero_grad()
            self.backward()
            before = self.state()
            self.optimizer.step()
            assert not all(map(torch.equal, before, self.state()))
        self.optimizer.zero_grad()
        self.backward()
        spoil(self.params)
        before = self.state()
        self.optimizer.step()
        skipped = all(map(torch.equal, before, self.state()))
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()
        assert not all(map(torch.equal, before, self.state()))
        assert all(bool(param.isfinite().all()) for param in self.params)
        return skipped


def _divide(params: Params) -> None:
    for param in params:
        param.grad.div_(param.grad.norm() * 0)


def _replace(params: Params) -> None:
    params[0].grad = params[0].grad * math.inf


def _replace_reusing_ids(params: Params) -> None:
    for param in params:
        shape, param.grad = param.grad.shape, None
        param.grad = torch.full(shape, math.nan)


def _write_one_element(params: Params) -> None:
    params[-1].grad.view(-1)[-1] = math.inf


def _multiply_all(params: Params) -> None:
    torch._foreach_mul_([param.grad for param in params], math.nan)


def _clip_by_nan(params: Params) -> None:
    torch.nn.utils.clip_grad_norm_(params, math.nan)


WAYS = ["scale_loss", "bf16 with a scale", "auto_scale", "O2", "FP16_Optimizer"]
SPOILS = [_divide, _replace, _replace_reusing_ids, _write_one_element, _multiply_all, _clip_by_nan]


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_become_nan_after_their_check_are_not_stepped(way: str, spoil: Callable[[Params], None]) -> None:
    assert Program(way).skips(spoil)


@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdam, torch.optim.RMSprop])
@pytest.mark.parametrize("way", ["scale_loss", "O2", "auto_scale"])
def test_written_gradients_are_checked_again_for_any_optimizer(way: str, make: Callable[..., Any]) -> None:
    assert Program(way, make).skips(_multiply_all)


@pytest.mark.parametrize("way", ["scale_loss", "auto_scale"])
def test_sparse_gradients_that_become_nan_are_not_stepped(way: str) -> None:
    def spoil(params: Params) -> None:
        params[0].grad.mul_(math.nan)

    assert Program(way, torch.optim.SparseAdam).skips(spoil)


@pytest.mark.parametrize("way", ["scale_loss", "auto_scale", "O2", "FP16_Optimizer"])
def test_hooks_that_make_nan_are_seen(way: str) -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        program = Program(way)
        leaf: Any = next(program.model.parameters())

        def spoil(params: Params, register: str = register, leaf: Any = leaf, program: Program = program) -> None:
            def after(param: Tensor) -> None:
                param.grad.mul_(math.nan)

            hook = getattr(leaf, register)(after if "post" in register else lambda gradient: gradient * math.nan)
            program.optimizer.zero_grad()
            program.backward()
            hook.remove()

        assert program.skips(spoil), register


@pytest.mark.parametrize("way", WAYS)
def test_a_second_step_by_the_same_gradients_is_checked(way: str) -> None:
    program = Program(way)
    program.backward()
    program.optimizer.step()
    before = program.state()
    program.params[0].grad.div_(0)  # type: ignore[union-attr]
    program.optimizer.step()
    assert all(map(torch.equal, before, program.state()))


@pytest.mark.parametrize("make", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_added_to_the_gradients_of_a_skipped_step_is_not_stepped(way: str, make: Callable[..., Any]) -> None:
    program = Program(way, make)
    program.backward()
    program.optimizer.step()
    before = program.state()
    _multiply_all(program.params)
    program.optimizer.step()
    for _ in range(2):
        program.backward()
        program.optimizer.step()
    assert all(map(torch.equal, before, program.state()))
    program.optimizer.zero_grad()
    program.backward()
    program.optimizer.step()
    assert not all(map(torch.equal, before, program.state()))
    assert all(bool(param.isfinite().all()) for param in program.params)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_whose_gradients_were_clipped_to_nan_is_skipped(way: str) -> None:
    def clip(params: Params) -> None:
        if way == "FP16_Optimizer":
            program.optimizer.clip_master_grads(math.nan)
        else:
            _handle().clip_grad_norm_(program.optimizer, math.nan)

    program = Program(way)
    assert program.skips(clip)


class _Ops(TorchDispatchMode):
    """Counts looks at gradients, and copies of tensors."""

    looks = copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.looks += "non_finite_check" in str(func)
        self.copies += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("way", "write", "looks"),
    [
        *((way, lambda program: None, 0) for way in WAYS),
        *((way, lambda program: torch.nn.utils.clip_grad_norm_(program.params, 1e-3), 1) for way in WAYS),
        # A norm that is finite leaves gradients finite.
        *((way, lambda program: _handle().clip_grad_norm_(program.optimizer, 1e-3), 0) for way in WAYS[:4]),
        ("FP16_Optimizer", lambda program: program.optimizer.clip_master_grads(1e-3), 0),
    ],
)
def test_only_what_was_written_is_looked_at_again(way: str, write: Callable[[Program], Any], looks: int) -> None:
    program = Program(way)
    program.backward()
    write(program)
    with _Ops() as ops:
        program.optimizer.step()
    assert ops.looks == looks


def _handle() -> autoamp.Handle:
    handle = autoamp.current_handle()
    assert handle is not None
    return handle


class _Layers:
    """Layers with an optimizer each, of which the first ones share a parameter."""

    def __init__(self, count: int, sharing: int) -> None:
        torch.manual_seed(0)
        self.shared = torch.nn.Parameter(torch.ones(4))
        self.layers = [Linear(4, 4) for _ in range(count)]
        self.optimizers = [
            torch.optim.SGD([*layer.parameters(), *([self.shared] if number < sharing else [])], lr=0.1)
            for number, layer in enumerate(self.layers)
        ]
        _, self.optimizers = autoamp.initialize(
            self.layers, self.optimizers, opt_level="O1", dtype=torch.float16, device_type="cpu", num_losses=2,
            verbosity=0,
        )  # fmt: skip

    def backward(self, numbers: Sequence[int], loss_id: int, *, through: Sequence[int], size: float = 0.125) -> None:
        """Scale a loss for some optimizers: of the shared parameter, and of the layers of some."""
        value = self.shared[None]
        for number in through:
            value = self.layers[number](value)
        with autoamp.scale_loss(
            value.float().sum() * size, [self.optimizers[number] for number in numbers], loss_id=loss_id
        ) as scaled:
            scaled.backward()

    def steps(self, order: Sequence[int]) -> list[bool]:
        """Step all, and return which moved their layers."""
        before = [layer.weight.detach().clone() for layer in self.layers]
        for number in order:
            self.optimizers[number].step()
        return [not torch.equal(value, layer.weight) for value, layer in zip(before, self.layers, strict=True)]


# Blocks name optimizers without a gradient, too.
@pytest.mark.filterwarnings("ignore:no parameter of SGD has a gradient after scale_loss")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
@pytest.mark.parametrize("first", [[0], [0, 1], [1]])
@pytest.mark.parametrize("sharing", [0, 3])
def test_inf_of_a_block_of_several_optimizers_or_in_what_they_share_skips_them_all(
    sharing: int, first: list[int], order: Sequence[int]
) -> None:
    program = _Layers(4, sharing)
    weight = program.shared.detach().clone()
    program.backward(first, 0, through=first, size=math.inf)
    program.shared.grad = program.shared.grad if sharing else None
    program.backward(range(4), 1, through=range(4))
    # Without a gradient in common the earlier overflow concerns those alone that it was checked for.
    assert program.steps(order) == [not sharing and number not in first for number in range(4)]
    assert torch.equal(weight, program.shared)
    assert autoamp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0
    for optimizer in program.optimizers:
        optimizer.zero_grad()
    program.shared.grad = None
    before = autoamp.state_dict()["loss_scaler1"]["loss_scale"]
    program.backward([0], 0, through=[0])
    program.backward(range(4), 1, through=[3], size=math.inf)
    assert program.steps(order) == [False] * 4
    assert autoamp.state_dict()["loss_scaler1"]["loss_scale"] == before / 2


class _Closure:
    """A closure that adds to the gradients that are there, and overflows at high scales."""

    def __init__(self, way: str, make: Callable[..., Any], clears: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Linear(4, 1)
        self.optimizer = make(self.model.parameters(), lr=0.1, **options)
        self.way, self.clears, self.calls = way, clears, 0
        if way != "plain":
            self.handle = autoamp.init(device_type="cpu", dtype=torch.float16)
        if way == "auto_scale":
            self.handle.auto_scale()

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.clears:
            self.optimizer.zero_grad(set_to_none=False)
        with contextlib.nullcontext() if self.way == "plain" else self.handle.disable_casts():
            # Large: scaled by 2**16 its gradients are beyond fp16, whose range the hook stands for.
            loss = (self.model(torch.full((2, 4), 3.0)) - 1.0).square().mean()
            loss = _Half.apply(loss)
        if self.way == "scale_loss":
            with self.handle.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        return loss.detach()


class _Half(torch.autograd.Function):
    """Passes a value on. Its gradient overflows above the largest finite fp16 number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.where(gradient.abs() > 30000.0, math.inf, gradient)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("there", ["nothing", "zeros", "a micro-batch"])
@pytest.mark.parametrize("way", ["scale_loss", "auto_scale"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {}), (torch.optim.LBFGS, {"max_iter": 3}),
        (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe"}),
    ],
)  # fmt: skip
def test_a_closure_that_overflows_is_evaluated_again_on_the_gradients_of_before(
    make: Callable[..., Any], options: dict[str, Any], way: str, there: str, clears: bool
) -> None:
    results = {}
    for one in ("plain", way):
        closure = _Closure(one, make, clears, **options)
        for param in closure.model.parameters():
            if there != "nothing":
                param.grad = torch.zeros_like(param) if there == "zeros" else torch.full_like(param, 0.25)
        first = [param.detach().clone() for param in closure.model.parameters()]
        while all(map(torch.equal, first, closure.model.parameters())):
            # Under auto_scale() the first evaluation is not repeated: the step is skipped.
            if there == "a micro-batch" and closure.calls:
                for param in closure.model.parameters():
                    param.grad = torch.full_like(param, 0.25)
            elif closure.calls:
                closure.optimizer.zero_grad()
            closure.optimizer.step(closure)
        results[one] = list(closure.model.parameters())
        if one != "plain":
            assert 2.0**13 <= closure.handle.loss_scale < 2.0**16
    for expected, param in zip(results["plain"], results[way], strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_where_closures_scale_no_loss_gradients_are_not_copied(dtype: torch.dtype) -> None:
    autoamp.init(device_type="cpu", dtype=dtype)
    model = Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    closure = _Closure("plain", torch.optim.SGD, clears=False)
    closure.model, closure.optimizer = model, optimizer
    optimizer.step(closure)
    # `_Half` makes one.
    with _Ops() as ops:
        optimizer.step(closure)
    assert ops.copies == 1


def test_a_repeated_evaluation_adds_no_gradient_a_second_time() -> None:
    results = []
    for way in ("plain", "auto_scale"):
        torch.manual_seed(0)
        model = Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        if way == "auto_scale":
            autoamp.init(device_type="cpu", dtype=torch.float16).auto_scale()
        calls = 0

        def closure(model: Linear = model) -> Tensor:
            nonlocal calls
            calls += 1
            # From the second evaluation on the gradient of the bias overflows, and that of the weight does not.
            bias = model.bias if calls == 1 else _Half.apply(model.bias)
            loss: Tensor = ((model.weight.sum() + bias) - 1.0).square().mean() * 0.25
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
        results.append([calls, *(param.detach().clone() for param in model.parameters())])
    (calls, *expected), (ours, *params) = results
    assert ours > calls
    torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-7)
