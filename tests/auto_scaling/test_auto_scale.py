"""`auto_scale()`: gradients are true wherever a program looks, and steps that overflowed are skipped."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.auto_scaling import AutoScale
from autoamp.runtime import runtime_of
from autoamp.scaling import UnreadFlags, local_of
from tests.waits import counted_reads

# No op is cast, so gradients must be bitwise those of plain torch.
NO_CASTS: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "lists": {"extends": []}}


@pytest.fixture
def handle() -> autoamp.Handle:
    return autoamp.init(**NO_CASTS)


@pytest.fixture
def scaling(handle: autoamp.Handle) -> AutoScale:
    return handle.auto_scale()


def make() -> tuple[nn.Sequential, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(5, 4)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def scaled(function: Callable[[], Any]) -> Any:
    """Run a function under automatic scaling, and see that its passes were scaled."""
    handle = autoamp.init(**NO_CASTS)
    seen: list[float] = []
    watch: Any = runtime_of(handle).optimizers.watch
    told = watch.loss_scaled

    def loss_scaled(loss: Tensor, scale: Any) -> None:
        seen.append(float(scale))
        told(loss, scale)

    watch.loss_scaled = loss_scaled
    with handle.auto_scale():
        result = function()
    assert seen
    assert min(seen) > 1
    handle.deactivate()
    return result


def train_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


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


# -- programs, each run with and without automatic scaling --


def accumulates() -> Any:
    model, optimizer, x = make()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    views = flat.split([p.numel() for p in model.parameters()])
    for parameter, view in zip(model.parameters(), views, strict=True):
        parameter.grad = view.view_as(parameter)
    seen = []
    for step in range(6):
        (model(x * step).square().mean() / 3).backward()
        # A flat buffer that gradients are views of stays one.
        seen.append(flat.clone())
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return seen, list(model.parameters())


def has_closures() -> Any:
    model, _optimizer, x = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return losses, list(model.parameters())


def has_several_losses() -> Any:
    model, optimizer, x = make()
    output = model(x)
    output.square().mean().backward(retain_graph=True)
    torch.autograd.backward([output.sum(), output[0]], [None, torch.ones(2)])  # type: ignore[list-item]
    seen = gradients(model)
    optimizer.step()
    return seen, list(model.parameters())


def has_double_backward() -> Any:
    model, optimizer, x = make()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient.norm() + model(x).sum()).backward()
    seen = gradients(model)
    optimizer.zero_grad()
    model(x).square().sum().backward(create_graph=True)
    sum(parameter.grad.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return seen, list(model.parameters())


def limits_the_inputs() -> Any:
    model, _optimizer, x = make()
    x.requires_grad_()
    model(x).sum().backward(inputs=[x, model[0].weight])
    assert model[2].weight.grad is None
    assert x.grad is not None
    # A tensor within the graph gets a gradient where it is named.
    hidden = model[0](x)
    model[2](hidden.tanh()).square().sum().backward(inputs=[hidden, model[2].bias])
    return x.grad, hidden.grad, gradients(model)


def shares_parameters() -> Any:
    model, one, x = make()
    other = torch.optim.SGD(model[0].parameters(), lr=0.01)
    model(x).square().mean().backward()
    one.step()
    other.step()
    return list(model.parameters())


def catches_exceptions() -> Any:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise KeyError("torn")

    model, _optimizer, x = make()
    with pytest.raises(KeyError, match="torn"):
        model[2](Fails.apply(model[0](x))).sum().backward()
    seen = gradients(model)
    model(x).sum().backward()
    return seen, gradients(model)


class Kind(Tensor):
    """A subclass, whose methods go through __torch_function__."""


def has_hooks_of_tensors() -> Any:
    model, optimizer, x = make()
    seen: list[Any] = []
    hidden = model[0](x).as_subclass(Kind)
    hidden.register_hook(lambda gradient: seen.append(gradient.as_subclass(Tensor).clone()))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    for tensor in (hidden, model[2].weight):
        tensor.register_hook(lambda gradient: (gradient.mul_(2), None)[1])

    def runs_another_pass(gradient: Tensor) -> None:
        with torch.enable_grad():
            (model[0].bias.sum() * 3).backward()

    model[2].bias.register_hook(runs_another_pass)
    model[2](hidden.as_subclass(Tensor)).square().mean().backward()
    optimizer.step()
    return seen, gradients(model), list(model.parameters())


def has_hooks_of_modules() -> Any:
    model, _optimizer, x = make()
    seen: list[Any] = []
    modules: Any = torch.nn.modules.module
    model[0].register_full_backward_hook(lambda _, into, out: seen.extend(out))
    model[0].register_full_backward_pre_hook(lambda _, out: (out[0] * 3,))
    model[1].register_full_backward_hook(lambda _, into, out: (into[0] * 2,))
    model[1].register_full_backward_hook(lambda _, into, out: (into[0].mul_(2), None)[1])
    model[2].register_backward_hook(lambda _, into, out: seen.extend([into[0], *out]))
    every = [
        modules.register_module_full_backward_hook(lambda _, into, out: seen.extend(out)),
        modules.register_module_full_backward_pre_hook(lambda _, out: seen.extend(out)),
    ]
    model(x).square().mean().backward()
    for registered in every:
        registered.remove()
    return seen, gradients(model)


def looks_at_gradients_from_hooks() -> Any:
    model, optimizer, x = make()
    seen: list[Tensor] = []

    def at_the_end() -> None:
        seen.extend(gradients(model))

    def clips_in_place(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())
        parameter.grad.clamp_(-0.01, 0.01)

    def within(module: nn.Module, into: Any, out: Any) -> None:
        seen.extend(gradients(model))
        torch.autograd.Variable._execution_engine.queue_callback(at_the_end)

    model[2].weight.register_post_accumulate_grad_hook(clips_in_place)
    x.requires_grad_()
    x.register_post_accumulate_grad_hook(clips_in_place)
    model[0].register_full_backward_hook(within)
    model[0].bias.register_hook(lambda gradient: seen.extend([gradient.clone(), *gradients(model)]))
    for _ in range(2):
        model(x).square().mean().backward()
    optimizer.step()
    return seen, gradients(model), list(model.parameters())


def reverses_gradients() -> Any:
    model, optimizer, x = make()
    hidden = model[0](x)
    hidden.register_hook(lambda gradient: -gradient)
    hidden.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    model[2](hidden).sum().backward()
    optimizer.step()
    return gradients(model), list(model.parameters())


class Adds(nn.Module):
    """What a checkpoint's inner pass reaches shares memory with what goes back into the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.full((3, 3), value)) for value in (0.5, 0.25))
        self.row, self.table = nn.Parameter(torch.ones(3)), nn.Embedding(3, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(torch.tensor([0, 2, 2]))
        return (x + self.one.unsqueeze(0) + self.other[None] + self.row.view(1, 1, 3) + rows + self.one.t()).square()


def checkpoints_what_shares_memory() -> Any:
    torch.manual_seed(5)
    model, head, free = Adds(), nn.Linear(3, 3), torch.full((3, 3), 0.125, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    seen = []
    for _ in range(3):
        x = checkpoint(head, torch.randn(1, 3, 3), use_reentrant=False)
        # Nobody but the program knows of this one, and only the checkpoint reaches it.
        x = checkpoint(lambda x: model(x) * free, x, use_reentrant=True)
        checkpoint(lambda x: model(x) + free, x, use_reentrant=True).sum().backward()
        seen.append(
            [parameter.grad.to_dense().clone() for parameter in (*model.parameters(), *head.parameters(), free)]
        )
    optimizer.step()
    return seen, list(model.parameters())


def steps_what_is_in_no_optimizer() -> Any:
    model, _optimizer, x = make()
    by_hand = nn.Linear(2, 2)

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in by_hand.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        by_hand(model(x)).square().mean().backward()
    return list(by_hand.parameters()), gradients(model)


def runs_a_pass_within_a_function() -> Any:
    model, _optimizer, x = make()

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                (model[0].bias.sum() * 3).backward()
                sums = [model[0].weight.sum(), model[0].bias.sum()]
                torch.autograd.backward([*sums, model[2].bias], [None, gradient[0, 0], gradient[0, :2]])
                with pytest.raises(RuntimeError, match="got 2 tensors and 1 gradients"):
                    torch.autograd.backward(sums, [gradient[0, 0]])
                with pytest.raises(RuntimeError, match="does not require grad"):
                    gradient.sum().backward()
            return gradient

    model[2](Function.apply(model[0](x))).square().mean().backward()
    return gradients(model)


def adds_a_group_late() -> Any:
    model, optimizer, x = make()
    late = nn.Linear(2, 2)
    late(model(x)).square().mean().backward()
    optimizer.add_param_group({"params": late.parameters()})
    late(model(x)).square().mean().backward()
    optimizer.step()
    return list(late.parameters()), list(model.parameters())


def runs_passes_with_gradients_of_hooks() -> Any:
    """What a hook runs backward begins with true gradients, and is a pass of its own. So is one within that."""
    model, optimizer, x = make()
    other, third = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer.add_param_group({"params": [*other.parameters(), *third.parameters()]})
    output = model(x)

    def innermost(gradient: Tensor) -> None:
        with torch.enable_grad():
            third(torch.ones(5, 2)).backward(gradient)

    def hook(gradient: Tensor) -> None:
        with torch.enable_grad():
            hidden = other(torch.ones(5, 2))
            hidden.register_hook(innermost)
            hidden.backward(gradient)
            checkpoint(other, torch.ones(5, 2, requires_grad=True), use_reentrant=True).backward(gradient)

    output.register_hook(hook)
    output.square().sum().backward()
    return gradients(model), gradients(other), gradients(third)


def retains_gradients() -> Any:
    model, _optimizer, x = make()
    x.requires_grad_()
    seen: list[Tensor] = []
    for _ in range(2):
        hidden = model[0](x)
        hidden.retain_grad()
        model[0].weight.register_hook(lambda _, hidden=hidden: seen.append(hidden.grad.clone()))
        for _ in range(2):
            hidden.tanh().square().sum().backward(retain_graph=True)
        # A pass that does not reach it leaves its gradient alone.
        model[2](hidden.detach().tanh()).sum().backward()
        seen.append(hidden.grad)
    return seen, x.grad, gradients(model)


def has_a_deep_graph() -> Any:
    """So deep that a walk through it may not be recursive."""
    model, _optimizer, x = make()
    value = model(x).sum()
    for _ in range(5000):
        value = value + 1
    value.backward()
    return gradients(model)


def runs_backward_in_threads() -> Any:
    model, _optimizer, x = make()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                hidden = model[0](x)
                # So that what is added up has no rounding, in whatever order.
                hidden.register_hook(lambda gradient: gradient.round())
                checkpoint(model[1], hidden, use_reentrant=True).sum().round().backward()
                (model[2].weight.sum() * 3).backward()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    return model[2].weight.grad, model[0].weight.grad.isfinite().all()


def asks_for_gradients_from_hooks() -> Any:
    """A run of autograd's engine within a hook, which goes by the same leaf, is not the pass."""
    model, _optimizer, x = make()
    seen: list[Tensor] = []
    weight = model[0].weight
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))

    def asks(gradient: Tensor) -> None:
        with torch.enable_grad():
            seen.append(torch.autograd.grad((weight * 3).sum(), weight)[0])

    model[2].weight.register_hook(asks)
    model(x).square().mean().backward()
    return seen, gradients(model)


PROGRAMS = [
    accumulates, adds_a_group_late, asks_for_gradients_from_hooks, catches_exceptions,
    checkpoints_what_shares_memory, has_a_deep_graph, has_closures, has_double_backward, has_hooks_of_modules,
    has_hooks_of_tensors, has_several_losses, limits_the_inputs, looks_at_gradients_from_hooks, retains_gradients,
    reverses_gradients, runs_a_pass_within_a_function, runs_backward_in_threads,
    runs_passes_with_gradients_of_hooks, shares_parameters, steps_what_is_in_no_optimizer,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward|Full backward hook:UserWarning", "ignore:Using a non-full")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_computes_what_it_computes_without_scaling(program: Callable[[], Any]) -> None:
    assert_equal(scaled(program), program())


# -- overflows --

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


def test_the_scale_of_a_half_loss_is_in_its_range(scaling: AutoScale) -> None:
    layer = nn.Linear(2, 2).half()
    _optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen: list[Tensor] = []
    layer.bias.register_hook(seen.append)
    assert root_gradient(layer(torch.ones(1, 2).half()).sum()) == 2.0**15
    layer.zero_grad()
    seen.clear()
    for count in (1, 2):
        (layer(torch.ones(1, 2).half()) * 2.0**-5).sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((2,), count * 2.0**-5).half())
    assert [gradient.dtype for gradient in seen] == [torch.float16] * 2


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
    assert len(runtime_of(handle).optimizers.guard(optimizer).checks.pending) < 100
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


# -- hooks, where ops are cast --


@pytest.fixture
def casting() -> autoamp.Handle:
    handle = autoamp.init(device_type="cpu", dtype=torch.float16)
    handle.auto_scale()
    return handle


def test_hooks_see_gradients_of_half_activations_that_half_precision_cannot_hold(casting: autoamp.Handle) -> None:
    layer, relu = nn.Linear(4, 4), nn.ReLU()
    nn.init.ones_(layer.weight)
    _optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    seen: list[Tensor] = []
    layer.register_full_backward_pre_hook(lambda _, out: (out[0] * 2,))
    relu.register_backward_hook(lambda _, into, out: (into[0] * 2,))
    hidden = relu(layer(torch.ones(1, 4)))
    assert hidden.dtype is torch.float16
    hidden.register_hook(lambda gradient: (seen.append(gradient.clone()), -gradient)[1])
    (hidden.float().sum() * 2.0**-28).backward()
    assert_equal(seen, [torch.full((1, 4), 2.0**-28)])
    assert torch.equal(layer.bias.grad, torch.full((4,), -(2.0**-26)))


def test_what_leads_to_a_checkpoint_is_scaled_too(casting: autoamp.Handle) -> None:
    """All parameters are within the checkpoint: the program's own pass reaches none of an optimizer."""
    layer, x = nn.Linear(4, 4), torch.ones(1, 4, requires_grad=True)
    _optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    hidden = checkpoint(layer, x, use_reentrant=True)
    assert hidden.dtype is torch.float16
    (hidden.float().sum() * 2.0**-28).backward()
    assert torch.equal(layer.bias.grad, torch.full((4,), 2.0**-28))
    assert x.grad is not None
    assert x.grad.any()


def test_hooks_compute_in_the_precision_of_gradients(casting: autoamp.Handle) -> None:
    layer, projection = nn.Linear(4, 4, bias=False), torch.eye(4) * 2
    _optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.weight.register_hook(lambda gradient: gradient @ projection)
    layer.weight.register_hook(lambda gradient: gradient.double())
    (layer(torch.ones(1, 4)).float().sum() * 2.0**-28).backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0**-27))


# -- which passes are scaled --


@pytest.mark.parametrize("ranks", [1, 2])
def test_flat_parameters_of_several_ranks_are_refused(ranks: int, fake_ranks: Callable[[int], None]) -> None:
    fake_ranks(ranks)
    autoamp.init(**NO_CASTS).auto_scale()
    model, _optimizer, x = make()
    # As FullyShardedDataParallel marks its parameters.
    model[0].weight._is_flat_param = True  # type: ignore[assignment]
    loss = model(x).sum()
    if ranks == 1:
        loss.backward()
    else:
        with pytest.raises(autoamp.UsageError, match=r"shards of flat parameters.*use bf16"):
            loss.backward()
    assert bool(gradients(model)) is (ranks == 1)


@pytest.mark.usefixtures("one_process")
def test_shards_of_parameters_are_checked(handle: autoamp.Handle, scaling: AutoScale) -> None:
    """The pass reaches whole parameters, from which torch reduces gradients onto shards."""
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = local_of(model.weight).clone()
    for factor, skipped in ((float("inf"), 1), (1.0, 1)):
        train_step(optimizer, model(torch.ones(1, 4)).sum() * factor)
        assert handle.skipped_steps == skipped
        assert torch.equal(local_of(model.weight), before - (0.5 if factor == 1.0 else 0.0))
    assert handle.loss_scale == 2.0**15


@pytest.mark.filterwarnings("error")
def test_an_optimizer_of_half_parameters_is_guarded_without_a_warning(
    handle: autoamp.Handle, scaling: AutoScale
) -> None:
    """It is the program's, which may never run a pass of its parameters."""
    optimizer = torch.optim.Adam(nn.Linear(2, 2).half().parameters(), eps=1e-8)
    assert runtime_of(handle).optimizers.guard_of(optimizer) is not None


def test_hooks_of_another_thread_are_left_alone(scaling: AutoScale) -> None:
    """One thread trains; while its pass runs another looks at the gradients of a frozen model."""
    model, _optimizer, x = make()
    frozen = nn.Linear(2, 1).requires_grad_(False)
    seen: list[Tensor] = []

    def look() -> None:
        image = torch.ones(1, 2, requires_grad=True)
        image.register_hook(seen.append)
        frozen(image).sum().backward()

    def hook(gradient: Tensor) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    model[0].weight.register_hook(hook)
    model(x).sum().backward()
    assert_equal(seen, [frozen.weight])


def test_hooks_of_leaves_from_before_auto_scale_see_true_gradients(handle: autoamp.Handle) -> None:
    model, _optimizer, x = make()
    seen: list[Tensor] = []
    model[2].bias.register_hook(seen.append)
    with handle.auto_scale():
        model(x).sum().backward()
    model(x).sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[5.0, 5.0]] * 2


def root_gradient(root: Tensor, gradient: Tensor | None = None, run: Callable[..., Any] = Tensor.backward) -> float:
    """Run a backward pass, and return the first element of the gradient with which it began."""
    seen: list[float] = []
    root.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].flatten()[0].item()))  # type: ignore[union-attr]
    run(root, gradient)
    return seen[0]


@pytest.mark.filterwarnings("ignore:`grad_variables` argument is deprecated")
@pytest.mark.parametrize(
    ("run", "factor"),
    [
        (lambda root, gradient: torch.autograd.backward(root, gradient), 2.0**16),
        (lambda root, gradient: torch.autograd.backward((root,), (gradient,)), 2.0**16),
        (lambda root, gradient: torch.autograd.backward([root], grad_variables=[gradient]), 2.0**16),
        (lambda root, gradient: torch.autograd.backward(root, gradient, create_graph=True), 1.0),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_all_spellings_of_a_pass_are_scaled(scaling: AutoScale, run: Callable[..., Any], factor: float) -> None:
    model, optimizer, x = make()
    assert root_gradient(model(x), torch.full((5, 2), 3.0), run) == 3.0 * factor
    assert model[2].bias.grad.tolist() == [15.0, 15.0]
    assert not model[2].bias.grad.requires_grad or factor == 1.0
    optimizer.zero_grad()


def test_passes_that_need_no_scale_are_left_alone(handle: autoamp.Handle, scaling: AutoScale) -> None:
    x = torch.ones(2, requires_grad=True)
    model, _optimizer, data = make()
    assert root_gradient(model(data).sum()) == 2.0**16
    assert root_gradient(model(data), torch.full((5, 2), 3.0)) == 3.0 * 2.0**16
    # No optimizer steps it.
    assert root_gradient(x.sum()) == 1.0
    assert torch.equal(torch.autograd.grad(x.sum(), x)[0], torch.ones(2))
    handle.deactivate()
    # bf16 has no loss scale.
    bf16 = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    with bf16.auto_scale():
        assert root_gradient(model(data).float().sum()) == 1.0
    assert bf16.loss_scale == 1.0


def test_torch_s_own_errors(scaling: AutoScale) -> None:
    model, _optimizer, x = make()
    for wrong, message in (
        (lambda: model(x).backward(), "grad can be implicitly created only for scalar outputs"),
        (lambda: model(x).sum().mul(1j).backward(), "only for real scalar outputs"),
        (lambda: x.sum().backward(), "does not require grad"),
        (lambda: model(x).backward(torch.ones(3)), "Mismatch in shape"),
        (lambda: model(x)[:0].backward(), "grad can be implicitly created only for scalar outputs"),
        (
            lambda: torch.autograd.backward([model(x).sum()], [1.0]),
            "gradients can be either Tensors or None, but got float",
        ),
        (lambda: torch.autograd.backward([model(x).sum()] * 2, [torch.ones(())]), "got 2 tensors and 1 gradients"),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
            wrong()
        assert not gradients(model)


def test_a_pass_from_an_edge_of_the_graph_is_left_alone(scaling: AutoScale) -> None:
    model, _optimizer, x = make()
    edge = torch.autograd.graph.get_gradient_edge(model(x))
    torch.autograd.backward([edge], [torch.ones(5, 2)])
    assert model[2].bias.grad.tolist() == [5.0, 5.0]


# -- losses that the program scales --


def test_blocks_of_the_program_are_its_own(handle: autoamp.Handle, scaling: AutoScale) -> None:
    model, optimizer, x = make()
    for optimizers, after in ((optimizer, 5.0), ([], 5.0 * 2.0**16)):
        optimizer.zero_grad()
        with handle.scale_loss(model(x).sum(), optimizers) as scaled_loss:
            scaled_loss.backward()
            assert float(model[2].bias.grad[0]) == 5.0 * 2.0**16
        assert float(model[2].bias.grad[0]) == after
    train_step(optimizer, model(x).sum())
    assert float(model[2].bias.grad[0]) == 5.0
    assert scaling.yielded_to is None


def test_auto_scale_begins_anew_after_a_training_with_mixed_precision_of_its_own(handle: autoamp.Handle) -> None:
    with handle.auto_scale() as scaling, torch.autocast("cpu", torch.bfloat16):
        assert scaling.yielded_to == "torch.autocast"
    with handle.auto_scale() as scaling:
        torch.amp.GradScaler("cpu").scale(torch.ones(()))
        assert scaling.yielded_to == "torch.amp.GradScaler"
    assert handle.auto_scale().yielded_to is None


@pytest.mark.parametrize("before", [True, False])
def test_auto_scale_yields_to_a_grad_scaler(handle: autoamp.Handle, before: bool) -> None:
    model, optimizer, x = make()
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if before else None
    scaling = handle.auto_scale()
    torch.amp.GradScaler("cpu", enabled=False).scale(torch.ones(()))
    grad_scaler = grad_scaler or torch.amp.GradScaler("cpu", init_scale=4.0)
    # One that is there, and scales nothing, leaves the scaling here.
    train_step(optimizer, model(x).sum())
    assert float(model[2].bias.grad[0]) == 5.0
    assert scaling.yielded_to is None
    assert scaling.has_unused_scaler is not before
    optimizer.zero_grad()
    grad_scaler.scale(model(x).sum()).backward()
    assert scaling.yielded_to == "torch.amp.GradScaler"
    assert not scaling.has_unused_scaler
    assert float(model[2].bias.grad[0]) == 20.0
    grad_scaler.step(optimizer)
    grad_scaler.update()
    assert float(model[2].bias.grad[0]) == 5.0


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_auto_scale_yields_to_autocast(scaling: AutoScale) -> None:
    with torch.autocast("cpu", enabled=False):
        pass
    # For an evaluation, and for another device.
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        pass
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pass
    assert scaling.yielded_to is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pass
    assert scaling.yielded_to == "torch.autocast"


# -- start and stop --


def test_it_ends(handle: autoamp.Handle) -> None:
    model, optimizer, x = make()
    original = Tensor.retain_grad
    scaling = handle.auto_scale()
    assert handle.auto_scale() is scaling
    assert Tensor.retain_grad is not original
    (model(x).sum() * float("inf")).backward()
    scaling.stop()
    assert not scaling.active
    assert Tensor.retain_grad is original
    # The step still reads the check from before.
    optimizer.step()
    assert handle.skipped_steps == 1
    # It goes on after a pause, and not after its end.
    with autoamp.region(device_type="cpu", dtype=torch.bfloat16):
        pass
    assert Tensor.retain_grad is original
    assert handle.auto_scale().active
    assert Tensor.retain_grad is not original
    handle.deactivate()
    assert Tensor.retain_grad is original
    with pytest.raises(autoamp.UsageError, match="not active"):
        handle.auto_scale()
    with autoamp.init(enabled=False).auto_scale() as disabled:
        assert not disabled.active


def test_it_rests_while_another_region_is_active(handle: autoamp.Handle, scaling: AutoScale) -> None:
    patched = torch.autograd.backward
    with autoamp.region(device_type="cpu", dtype=torch.bfloat16):
        assert torch.autograd.backward is not patched
    model, optimizer, x = make()
    train_step(optimizer, model(x).sum() * float("inf"))
    assert handle.skipped_steps == 1


def test_master_weights_need_scale_loss() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    autoamp.initialize(layer, optimizer, opt_level="O2", dtype=torch.float16, verbosity=0)
    handle: Any = autoamp.current_handle()
    with pytest.raises(autoamp.UsageError, match="master weights; use scale_loss"):
        handle.auto_scale()


def test_models_and_optimizers_are_collectable(scaling: AutoScale, collected: Any) -> None:
    model, optimizer, x = make()
    hidden = model[0](x)
    hidden.retain_grad()
    model[2](hidden).sum().backward()
    optimizer.step()
    references = [weakref.ref(model[0].weight), weakref.ref(optimizer), weakref.ref(hidden)]
    del model, optimizer, hidden
    collected()
    assert [reference() for reference in references] == [None] * 3


def test_compiled_models(scaling: AutoScale) -> None:
    model, optimizer, x = make()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    got = gradients(model)
    train_step(optimizer, model(x).square().mean())
    torch.testing.assert_close(got, gradients(model))
    torch._dynamo.reset()


def noted(module: nn.Module, into: Any, out: Any) -> None:
    """A hook that pickles by its name."""


def test_modules_with_hooks_are_copied_and_pickled(scaling: AutoScale) -> None:
    layer = nn.Linear(2, 2)
    layer.register_full_backward_hook(noted)
    loaded = pickle.loads(pickle.dumps(layer))
    assert list(loaded._backward_hooks.values()) == [noted]
    copied = copy.deepcopy(layer)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    train_step(optimizer, copied(torch.ones(1, 2)).sum())
