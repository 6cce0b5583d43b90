"""The cache of parameter casts: no output ever comes from a stale weight, and within a module call casts are shared."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp

HALF = torch.float16
LISTS = {
    "extends": [],
    "fp16": ["linear", "matmul", "lstm", "conv2d"],
    "fp32": ["softmax", "layer_norm", "cross_entropy"],
}


def start(**settings: Any) -> autoamp.Handle:
    handle = autoamp.init(device_type="cpu", dtype=HALF, lists=LISTS, **settings)
    assert isinstance(handle, autoamp.Handle)
    return handle


@pytest.fixture
def handle() -> autoamp.Handle:
    return start()


class Counter(TorchDispatchMode):
    """Counts casts of parameters to half, whoever makes them, in the threads that enter it."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In inference mode `to` itself gets here.
        casts = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to)
        if casts and HALF in (*args[1:], *(kwargs or {}).values()):
            self.of[id(args[0])] = self.of.get(id(args[0]), 0) + 1
        return func(*args, **kwargs or {})

    def __getitem__(self, parameter: Parameter) -> int:
        return self.of.get(id(parameter), 0)


@pytest.fixture
def counter() -> Iterator[Counter]:
    """Count the casts of the test."""
    with Counter() as counting:
        yield counting


def expected(x: Tensor, weight: Tensor) -> Tensor:
    """What F.linear must give for the weight's value of now."""
    return (x.half() @ weight.detach().half().t()).float()


# -- every way to write to a weight --


def swapped_twice(weight: Parameter, value: Tensor) -> None:
    # The second tensor may well lie where the first weight lay.
    weight.data = torch.zeros_like(value)
    weight.data = value.clone()


def stepped(weight: Parameter, value: Tensor) -> None:
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = weight - value
    optimizer.step()


# Each is called without gradients.
WRITES: dict[str, Callable[[Parameter, Tensor], object]] = {
    "copy": lambda weight, value: weight.copy_(value),
    "new data": lambda weight, value: setattr(weight, "data", value.clone()),
    "data": lambda weight, value: weight.data.copy_(value),
    "detach": lambda weight, value: weight.detach().copy_(value),
    "numpy": lambda weight, value: np.copyto(weight.numpy(), value.numpy()),
    "storage": lambda weight, value: weight.untyped_storage().copy_(value.clone().untyped_storage()),
    "new data twice": swapped_twice,
    "step": stepped,
}

MODES: dict[str, Callable[[], Any]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize(
    ("before", "after"),
    [("grad", "grad"), ("no_grad", "grad"), ("grad", "inference_mode"), ("inference_mode", "no_grad")],
)
@pytest.mark.parametrize("bare", [False, True], ids=["module", "function"])
def test_each_next_output_is_right_after_any_write(handle: autoamp.Handle, before: str, after: str, bare: bool) -> None:
    x = torch.randn(3, 4)
    for name, write in WRITES.items():
        layer = nn.Linear(4, 4, bias=False)

        def call(layer: nn.Linear = layer) -> Tensor:
            return F.linear(x, layer.weight) if bare else layer(x)

        for _ in range(2):
            with MODES[before]():
                assert torch.equal(call().float(), expected(x, layer.weight)), name
            with torch.no_grad():
                write(layer.weight, torch.randn(4, 4))
            with MODES[after]():
                output = call()
            assert output.dtype == HALF
            assert output.requires_grad == (after == "grad")
            assert torch.equal(output.detach().float(), expected(x, layer.weight)), name


@pytest.mark.parametrize("mode", MODES)
def test_load_state_dict_reaches_the_next_output(handle: autoamp.Handle, mode: str) -> None:
    x = torch.randn(3, 4)
    for assign in (False, True):
        layer, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        with MODES[mode]():
            layer(x)
            layer.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
            assert torch.equal(layer(x).float(), expected(x, other.weight))


@pytest.mark.parametrize("mode", MODES)
def test_writes_to_a_flat_buffer_of_parameters_reach_the_next_output(handle: autoamp.Handle, mode: str) -> None:
    flat = torch.randn(32)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for index, parameter in enumerate(model.parameters()):
        parameter.data = flat[index * 16 : index * 16 + 16].view(4, 4)
    x = torch.randn(3, 4)
    for _ in range(3):
        with MODES[mode]():
            output = model(x)
            hidden = expected(x, flat[:16].view(4, 4))
            assert torch.equal(output.float(), expected(hidden, flat[16:].view(4, 4)))
        flat.normal_()


class Switching(nn.Module):
    """Uses one weight in several grad modes within one call."""

    def __init__(self, modes: list[str]) -> None:
        super().__init__()
        self.layer, self.modes = nn.Linear(4, 4, bias=False), modes

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(3, 4)
        for mode in self.modes:
            with MODES[mode]():
                y = self.layer(x)
            total = total + (y.clone() if mode == "inference_mode" else y)
        return total


@pytest.mark.parametrize(
    "modes",
    [
        ["no_grad", "grad"],
        ["grad", "no_grad"],
        ["grad", "no_grad", "grad"],
        ["inference_mode", "grad"],
        ["inference_mode", "no_grad", "grad"],
        ["no_grad", "inference_mode", "grad"],
    ],
    ids="-".join,
)
def test_gradients_are_right_if_grad_modes_change_within_one_call(handle: autoamp.Handle, modes: list[str]) -> None:
    model = Switching(modes)
    x = torch.randn(3, 4)
    model(x).sum().backward()
    # d/dw of sum(x w^T) is the column sums of x, once for each use that records.
    once = x.half().sum(0).float().expand(4, 4)
    torch.testing.assert_close(model.layer.weight.grad, once * modes.count("grad"), rtol=1e-2, atol=1e-2)


class WithinOneCall(nn.Module):
    """Uses a weight, lets somebody write to it, and uses it again."""

    def __init__(self, write: Callable[[Parameter, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4, bias=False), write

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layer(x)
        with torch.no_grad():
            self.write(self.layer.weight, torch.randn(4, 4))
        return first, self.layer(x)


@pytest.mark.parametrize("write", ["copy", "new data", "new data twice", "step"])
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_a_write_within_one_call_reaches_the_next_use(handle: autoamp.Handle, write: str, mode: str) -> None:
    model = WithinOneCall(WRITES[write])
    x = torch.randn(3, 4)
    for _ in range(5):
        with MODES[mode]():
            _, second = model(x)
        assert torch.equal(second.detach().float(), expected(x, model.layer.weight))


# -- that the cache does work --


class Repeats(nn.Module):
    """Uses a layer several times in one call."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x).float().sum() for _ in range(self.times)]).sum()


class Transforms(nn.Module):
    """Uses a layer within functional transforms and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda a: self.layer(a).float().square().sum())(x)
        each = torch.vmap(self.layer)(x)
        return (self.layer(x).float() + slope + each.float() + self.layer(slope).float()).sum()


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_used_often_in_one_call_is_cast_twice(handle: autoamp.Handle, counter: Counter, mode: str) -> None:
    model = Repeats(5)
    with MODES[mode]():
        for calls in (1, 2):
            model(torch.randn(3, 4))
            # The first use is the last of most weights. The second keeps its cast.
            assert counter[model.layer.weight] == counter[model.layer.bias] == 2 * calls
            assert len(handle.cache) == 0


def test_without_caching_each_use_casts(counter: Counter) -> None:
    handle = start(enable_caching=False)
    model = Repeats(5)
    model(torch.randn(3, 4))
    assert counter[model.layer.weight] == 5
    assert len(handle.cache) == 0


@pytest.mark.parametrize("make", [lambda: Repeats(4), Transforms], ids=["repeats", "transforms"])
def test_gradients_add_up_over_a_shared_cast(make: Callable[[], nn.Module]) -> None:
    x, model, results = torch.randn(3, 4), make(), []
    for enable_caching in (True, False):
        start(enable_caching=enable_caching)
        model.zero_grad()
        output = model(x)
        output.backward()
        results.append([output, *(parameter.grad for parameter in model.parameters())])
    for cached, uncached in zip(*results, strict=True):
        assert cached.dtype == torch.float32
        torch.testing.assert_close(cached, uncached, rtol=2e-3, atol=2e-3)


def test_nothing_is_kept_after_an_exception(handle: autoamp.Handle) -> None:
    class Fails(Repeats):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            assert len(handle.cache) == 2
            raise KeyError("gone wrong")

    model = Fails(2)
    for _ in range(2):
        with pytest.raises(KeyError, match="gone wrong"):
            model(torch.randn(3, 4))
        assert len(handle.cache) == 0


def test_threads_do_not_share_casts(handle: autoamp.Handle, counter: Counter) -> None:
    model, barrier = Repeats(3), threading.Barrier(2)

    def meet(*_: Any) -> None:
        barrier.wait(timeout=30)

    def run(_: int) -> int:
        with counter:
            model(torch.randn(3, 4))
        return len(handle.cache)

    model.layer.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [0, 0]
    assert counter[model.layer.weight] == 4


# -- inference(model): the explicit promise --


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_inference_casts_once_over_many_calls(handle: autoamp.Handle, counter: Counter, mode: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    with handle.inference(model), MODES[mode]():
        outputs = [model(x) for _ in range(4)]
        assert len(handle.cache) == 4
        assert [counter[parameter] for parameter in model.parameters()] == [1, 1, 1, 1]
        # A weight's other uses share the cast.
        F.linear(x, model[0].weight)
        assert len(handle.cache) == 4
    assert [counter[parameter] for parameter in model.parameters()] == [1, 1, 1, 1]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert len(handle.cache) == 0


@pytest.mark.parametrize("first", ["no_grad", "inference_mode"])
def test_inference_serves_both_modes(handle: autoamp.Handle, counter: Counter, first: str) -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with handle.inference(model):
        with MODES[first]():
            model(x)
        with torch.no_grad():
            model(x)
            with torch.inference_mode():
                model(x)
        # With gradients the weights are asked anew: a kept cast would cut the graph.
        model(x).float().sum().backward()
    assert model.weight.grad is not None
    assert counter[model.weight] == 2


def test_inference_blocks_may_end_in_another_order(handle: autoamp.Handle, counter: Counter) -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    first, second = handle.inference(model), handle.inference(model)
    with torch.no_grad():
        first.__enter__()
        second.__enter__()
        model(x)
        first.__exit__(None, None, None)
        model(x)
        assert counter[model.weight] == 1
        second.__exit__(None, None, None)
        assert len(handle.cache) == 0
        model(x)
    assert counter[model.weight] == 2


def test_inference_from_many_threads(handle: autoamp.Handle) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    reference = expected(x, layer.weight)

    def serve(_: int) -> None:
        with handle.inference(layer), torch.no_grad():
            assert torch.equal(layer(x).float(), reference)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(serve, range(200))) == [None] * 200
    assert len(handle.cache) == 0


def test_an_exception_within_inference_leaves_no_cast(handle: autoamp.Handle) -> None:
    model = nn.Linear(4, 4)
    with contextlib.suppress(KeyError), torch.no_grad(), handle.inference(model):
        model(torch.randn(3, 4))
        assert len(handle.cache) == 2
        raise KeyError
    assert len(handle.cache) == 0
