"""Looking for overflows changes no result, no graph and no mode of the program, and ends with the handle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import autoamp
from tests.tools.faults import Net, found_in, line_of, mean_square, modes, squared, started, take_step, train


@pytest.mark.parametrize("traced", [True, False])
def test_all_steps_of_a_traced_run_are_recorded_and_else_those_after_a_skip(traced: bool) -> None:
    """All of a traced run; else those after a skip."""
    seen = []

    def loss(out: Tensor) -> Tensor:
        seen.append(len(_get_current_dispatch_mode_stack()) > 0)
        return mean_square(out)

    train(Net(squared), loss=loss, steps=3, traced=traced)
    assert seen == [traced, True, True]
    assert modes() == 0


class Passing(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Passing, functools.partial(torch.device, "cpu")])
@pytest.mark.parametrize("enters", ["before", "within"])
def test_modes_of_the_program_that_end_within_the_loss(kind: Callable[[], Any], enters: str) -> None:
    mode = kind()

    def data(x: Tensor, step: int) -> Tensor:
        if enters == "before":
            mode.__enter__()
        return x

    def loss(out: Tensor) -> Tensor:
        if enters == "within":
            mode.__enter__()
        size = out.float().mul(1e30)
        mode.__exit__(None, None, None)
        return size.pow(2).sum()

    assert found_in(train(Net(), loss=loss, data=data)).location == line_of(loss, "pow(2)")
    assert modes() == 0


@pytest.mark.parametrize("when", ["before the handle", "after the handle", "after a step"])
@pytest.mark.parametrize("what", ["model", "loss", "part"])
def test_compiled_code_runs_as_without(what: str, when: str) -> None:
    """No mode is on, so that Dynamo makes one graph and each call runs it; modes would break it."""
    runs = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (runs.append(1), graph(*args))[1]

    def begin(net: Net) -> Any:
        if what == "part":
            net.faulty.compile(backend=backend, fullgraph=True)
            return net, mean_square
        compiled = torch.compile(mean_square if what == "loss" else net, backend=backend, fullgraph=True)
        return (net, compiled) if what == "loss" else (compiled, mean_square)

    torch._dynamo.reset()
    net = Net(lambda h: h * 2.0)
    model, loss = begin(net) if when == "before the handle" else (net, mean_square)
    handle = started()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if when == "after a step":
        take_step(handle, net, optimizer)
    if when != "before the handle":
        model, loss = begin(net)
    for _ in range(3):
        take_step(handle, model, optimizer, loss)
    assert len(runs) == 3
    assert handle.skipped_steps == 0


def test_a_stack_trace_of_a_call_has_one_frame_of_the_package() -> None:
    def fault(h: Tensor) -> Tensor:
        raise ValueError

    handle, net = started(), Net(fault)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        net(torch.randn(5, 4))
    files = [str(entry.path) for entry in caught.traceback]
    package = str(Path(autoamp.__file__).parent)
    of_the_model = files[: next(i for i, entry in enumerate(caught.traceback) if entry.name == "forward")]
    assert sum(file.startswith(package) for file in of_the_model) == 1
    # The call that raised has ended.
    net.faulty.fault = squared
    take_step(handle, net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert found_in(handle).module == "faulty"


def test_modes_of_the_watch_end_with_the_handle() -> None:
    handle = started()
    out = Net()(torch.randn(5, 4))
    assert out.requires_grad
    assert modes() == 2
    handle.deactivate()
    assert modes() == 0


def test_looking_on_is_not_counted_or_traced() -> None:
    def calls(traced: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        handle, net = started(64.0, traced=traced), Net(squared)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with handle.count() as counts, handle.trace() as trace:
            take_step(handle, net, optimizer)
            handle.explain_overflow(lambda: mean_square(net(torch.randn(5, 4))))
        assert handle.skipped_steps == 1
        handle.deactivate()
        return counts.as_dict(), [(row.op, row.calls, row.casts) for row in trace.rows]

    assert calls(True) == calls(False)


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def cross_entropy(out: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), torch.zeros(8, dtype=torch.long))


def operators_of_step(loss: Callable[[Tensor], Tensor], *, traced: bool) -> int:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
    optimizer, handle = torch.optim.SGD(model.parameters(), lr=0.01), started(64.0, traced=traced)
    x = torch.randn(2, 4, 16)
    for _ in range(12):
        take_step(handle, model, optimizer, loss, x)
    with Operators() as operators:
        take_step(handle, model, optimizer, loss, x)
    assert handle.skipped_steps == 0
    handle.deactivate()
    return operators.count


@pytest.mark.parametrize("loss", [cross_entropy, mean_square])
def test_a_clean_step_runs_no_more_operators(loss: Callable[[Tensor], Tensor]) -> None:
    assert operators_of_step(loss, traced=True) == operators_of_step(loss, traced=False)


class Refusing(Tensor):
    """A tensor that cannot be cast, as where memory ends."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("to", "float"):
            raise RuntimeError("out of memory")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("traced", [True, False])
def test_a_call_whose_outputs_cannot_be_cast_has_ended(traced: bool) -> None:
    handle, net = started(traced=traced, scope="modules"), Net(lambda h: h.as_subclass(Refusing))
    net.last = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        net(torch.randn(5, 4))
    net = Net(squared)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(1 if traced else 2):
        take_step(handle, net, optimizer)
    assert found_in(handle).module == "faulty"
