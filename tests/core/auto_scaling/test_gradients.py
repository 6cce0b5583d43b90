"""Under `auto_scale()` gradients are true wherever a program looks: programs with and without it are bitwise equal."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.core import AutoScale, Listener, runtime_of
from tests.core.auto_scaling.programs import NO_CASTS, assert_equal, gradients, make


class Scales(Listener):
    """Notes the scales of backward passes."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def loss_scaled(self, loss: Tensor, scale: Any) -> None:
        # The passes that nobody scales are told too.
        self.seen += [float(scale)] if scale != 1.0 else []


def scaled(function: Callable[[], Any]) -> Any:
    """Run a function under automatic scaling, and see that its passes were scaled."""
    handle, heard = autoamp.init(**NO_CASTS), Scales()
    runtime_of(handle).optimizers.listeners.add(heard)
    with handle.auto_scale():
        result = function()
    assert heard.seen
    assert min(heard.seen) > 1
    handle.deactivate()
    return result


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
    # One that is named twice gets its gradient once.
    model(x).sum().backward(inputs=[x, model[0].weight, model[0].weight])
    assert model[2].weight.grad is None
    assert x.grad is not None
    # A tensor within the graph gets a gradient where it is named.
    hidden = model[0](x)
    model[2](hidden.tanh()).square().sum().backward(inputs=[hidden, model[2].bias])
    # One that keeps its gradient has it still after a pass that does not run its node.
    kept = model[0](x)
    kept.retain_grad()
    kept.sum().backward(retain_graph=True)
    model[2](kept.tanh()).sum().backward(inputs=[model[2].weight])
    # Torch takes any iterable.
    model(x).sum().backward(inputs=model.parameters())
    torch.autograd.backward(deque([model(x).sum()]), deque([torch.tensor(1.0)]), inputs=iter([x]))
    return x.grad, hidden.grad, kept.grad, gradients(model)


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
    hidden.register_hook(lambda gradient: -gradient)
    hidden.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
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
                torch.autograd.backward(deque([model[0](x).sum()]), inputs=model[0].parameters())
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

    def work(_: int) -> None:
        for _ in range(10):
            hidden = model[0](x)
            # So that what is added up has no rounding, in whatever order.
            hidden.register_hook(lambda gradient: gradient.round())
            checkpoint(model[1], hidden, use_reentrant=True).sum().round().backward()
            (model[2].weight.sum() * 3).backward()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    return model[2].weight.grad, model[0].weight.grad.isfinite().all()


def asks_for_gradients_from_another_thread() -> Any:
    """While a pass runs, another thread runs autograd's engine through the root of that pass."""
    model, _optimizer, x = make()
    seen: list[Tensor] = []
    loss = model(x).square().mean()

    def asks() -> None:
        seen.extend(torch.autograd.grad(loss * 1.0, list(model.parameters()), retain_graph=True))

    def waits(gradient: Tensor) -> None:
        if threading.current_thread() is threading.main_thread():
            asking = threading.Thread(target=asks)
            asking.start()
            asking.join()

    loss.grad_fn.next_functions[0][0].register_prehook(lambda gradients: waits(gradients[0]))
    loss.backward(retain_graph=True)
    return seen, gradients(model)


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
    accumulates, adds_a_group_late, asks_for_gradients_from_another_thread, asks_for_gradients_from_hooks,
    catches_exceptions,
    checkpoints_what_shares_memory, has_a_deep_graph, has_closures, has_double_backward, has_hooks_of_modules,
    has_hooks_of_tensors, has_several_losses, limits_the_inputs, looks_at_gradients_from_hooks, retains_gradients,
    runs_a_pass_within_a_function, runs_backward_in_threads,
    runs_passes_with_gradients_of_hooks, shares_parameters, steps_what_is_in_no_optimizer,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward|Full backward hook:UserWarning", "ignore:Using a non-full")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_computes_what_it_computes_without_scaling(program: Callable[[], Any]) -> None:
    assert_equal(scaled(program), program())


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


def test_hooks_of_another_thread_are_left_alone(scaling: AutoScale) -> None:
    """One thread trains; while its pass runs another looks at the gradients of a frozen model."""
    model, _optimizer, x = make()
    frozen = nn.Linear(2, 1).requires_grad_(False)
    seen: list[Tensor] = []

    def look() -> None:
        image = torch.ones(1, 2, requires_grad=True)
        image.register_hook(seen.append)
        frozen(image).sum().backward()

    with ThreadPoolExecutor(1) as pool:
        model[0].weight.register_hook(lambda _: pool.submit(look).result())
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
