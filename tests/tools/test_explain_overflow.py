"""`handle.explain_overflow`: which losses it takes, and that it leaves a training as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp.errors import UsageError
from autoamp.fp16_utils import FP16_Optimizer
from tests.tools.faults import BIG_TIMES_BIG, Net, line_of, mean_square, squared, started, take_step


def test_explain_overflow_names_op_and_line_of_a_loss() -> None:
    handle = started(traced=False)
    net, x = Net(), torch.randn(5, 4)

    def step() -> Tensor:
        return (net(x).float() * 1e30).pow(2).sum()

    found = handle.explain_overflow(step)
    assert (found.op, found.location) == ("pow", line_of(step, "pow(2)"))
    assert handle.explain_overflow(lambda: mean_square(net(x))) is None


class Stateful(Net):
    """Writes attributes and buffers, of which one is None at first, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(squared)
        self.seen, self.generator = [0.0], torch.Generator().manual_seed(3)
        self.mean: Tensor | None
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.sum()))
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean + 0.5 * x.mean(0)
        return super().forward(x + self.mean + torch.rand(4, generator=self.generator))

    def state(self) -> list[Tensor]:
        generators = [self.generator.get_state(), torch.get_rng_state()]
        return [*self.state_dict().values(), *generators, torch.tensor(self.seen)]


def test_a_loss_that_is_explained_leaves_everything_as_it_was() -> None:
    handle, net = started(traced=False), Stateful()
    for calls in range(2):
        before = net.state()
        found = handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))))
        assert found.location == BIG_TIMES_BIG
        assert (len(net.seen), net.mean is None) == (1 + calls, calls == 0)
        assert all(map(torch.equal, net.state(), before))
        assert all(param.grad is None for param in net.parameters())
        net(torch.randn(5, 4))


REFUSED = {
    "scale_loss": "scaled a loss", "FP16_Optimizer": "ran a backward pass", "GradScaler": "scaled a loss",
    "backward": "ran a backward pass", "step": "called an optimizer", "closure": "called an optimizer",
    "nested": r"called explain_overflow\(\)",
    "None": "returned None", "float": "returned a float",
    "no graph": "returned a Tensor", "several": "returned a Tensor",
}  # fmt: skip


@pytest.mark.parametrize("way", REFUSED)
def test_explain_takes_a_loss_before_its_backward_pass(way: str) -> None:
    """What else is given is refused, and changes nothing."""
    handle, net = started(None, traced=False), Net()
    optimizer: Any = (torch.optim.LBFGS if way == "closure" else torch.optim.SGD)(net.parameters(), lr=0.1)
    if way == "FP16_Optimizer":
        optimizer = FP16_Optimizer(optimizer)
    # Times the loss scale these would be inf.
    for param in net.parameters():
        param.grad = torch.full_like(param, 1e35)
    before, scale = [param.clone() for param in net.parameters()], handle.loss_scale
    returned: dict[str, Any] = {
        "None": lambda loss: None, "float": Tensor.item,
        "no graph": Tensor.detach, "several": lambda loss: loss.expand(2),
    }  # fmt: skip

    def step() -> Any:
        loss = mean_square(net(torch.randn(5, 4)))
        if way in returned:
            return returned[way](loss)
        if way == "scale_loss":
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        elif way == "FP16_Optimizer":
            optimizer.backward(loss)
        elif way == "GradScaler":
            torch.amp.GradScaler("cpu").scale(loss).backward()
        elif way == "nested":
            handle.explain_overflow(step)
        elif way == "backward":
            loss.backward()
        else:
            optimizer.step(*([lambda: loss] if way == "closure" else []))
        return loss

    with pytest.raises(UsageError, match=rf"returns the loss before its backward pass, .* this one {REFUSED[way]}"):
        handle.explain_overflow(step)
    assert all(map(torch.equal, net.parameters(), before))
    assert all(bool((param.grad == 1e35).all()) for param in net.parameters() if param.grad is not None)
    assert (handle.loss_scale, handle.stats["steps"], handle.stats["skipped"]) == (scale, 0, 0)
    take_step(handle, net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert (handle.stats["steps"], handle.last_step_skipped) == (1, False)


def test_another_thread_trains_while_a_loss_is_explained() -> None:
    handle, net, other = started(traced=False), Net(), Net()

    def step() -> Tensor:
        thread = threading.Thread(target=lambda: mean_square(other(torch.randn(5, 4))).backward())
        thread.start()
        thread.join()
        return mean_square(net(torch.randn(5, 4)))

    assert handle.explain_overflow(step) is None
    assert all(param.grad is not None for param in other.parameters())


def test_explain_between_forward_and_loss_leaves_the_watch_of_the_step() -> None:
    handle, net = started(64.0), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    out = net(torch.randn(5, 4))
    assert handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4)))) is None
    with handle.scale_loss((out.float() * 1e30).pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert handle.last_overflow is not None
    assert handle.last_overflow.op == "pow"


def test_a_block_that_is_refused_leaves_no_verdict_on_gradients() -> None:
    handle = started("dynamic")
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1e-34)
    # Finite, and inf if it were multiplied by the loss scale.
    param.grad = torch.full((2,), 1e34)

    def block() -> torch.Tensor:
        loss = param.sum()
        with handle.scale_loss(loss, optimizer):
            return loss

    try:
        with pytest.raises(UsageError):
            handle.explain_overflow(block)
        optimizer.step()
        assert not handle.last_step_skipped
        torch.testing.assert_close(param.detach(), torch.zeros(2), atol=1e-6, rtol=0.0)
    finally:
        handle.deactivate()


@pytest.mark.parametrize("delayed", [False, True])
def test_a_function_that_is_refused_as_it_scales_its_loss_leaves_gradients_and_verdicts(delayed: bool) -> None:
    handle, layer = started(traced=False), torch.nn.Linear(2, 1)
    optimizer, x = torch.optim.SGD(layer.parameters(), lr=0.5), torch.ones(3, 2)

    def backward(factor: float) -> None:
        with handle.scale_loss((layer(x) * factor).mean(), optimizer, delay_unscale=delayed) as scaled:
            scaled.backward()

    def scales() -> Tensor:
        loss = layer(x).mean()
        with handle.scale_loss(loss, optimizer):
            return loss

    bias = layer.bias.item()
    # Delayed: the gradient is scaled still. Else: the step was skipped, and its gradients are there still.
    backward(1.0 if delayed else float("inf"))
    if not delayed:
        optimizer.step()
        assert handle.last_step_skipped
    with pytest.raises(UsageError, match="scaled a loss"):
        handle.explain_overflow(scales)
    optimizer.step()
    assert handle.last_step_skipped is not delayed
    assert layer.bias.item() == (pytest.approx(bias - 0.5) if delayed else bias)


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.inner(x).square().mean()
        return result


def test_a_compiled_model_that_writes_an_attribute_is_looked_at() -> None:
    """Dynamo traces the hooks that keep the state of modules."""
    handle = started(traced=False)
    model, x = Counting(), torch.randn(4, 8)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(x).backward()
    found = handle.explain_overflow(lambda: compiled(x) * torch.inf)
    assert "the program uses torch.compile" in str(found)
    assert handle.explain_overflow(lambda: compiled(x)) is None
