"""What is kept of casts, and that it is never handed out once its source, or it itself, was written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

import autoamp
from autoamp.core import CastState
from tests.core.casting._shared import make

HALF = torch.bfloat16


@pytest.fixture
def casts() -> CastState:
    """Casts to fp16, as they are within a module call."""
    made = make()
    made.thread.param_casts = {}
    return made


# -- parameters --


def test_cache_leaves_out_what_needs_no_cast_or_has_no_version(casts: CastState) -> None:
    for parameter in (Parameter(torch.ones(2, dtype=torch.float64)), Parameter(torch.ones(2).half())):
        assert casts.to_half(parameter) is parameter
    with torch.inference_mode():
        born_in_inference = Parameter(torch.ones(2), requires_grad=False)
        assert casts.to_half(born_in_inference) is not casts.to_half(born_in_inference)
    assert len(casts.cache) == 0


def test_no_wrapper_of_a_transform_outlives_it(casts: CastState) -> None:
    parameter, x = Parameter(torch.ones(2)), torch.ones(2)

    def transformed() -> None:
        torch.func.grad(lambda y: (casts.to_half(parameter) * casts.args_to_half([x, y])[1]).sum())(torch.ones(2))

    transformed()
    for cast in (casts.to_half(parameter), casts.args_to_half([x])[0]):
        assert not is_functorch_wrapped_tensor(cast)
    parameter.requires_grad_(False)
    kept = len(casts.cache)
    with casts.cache.pin([parameter]):
        transformed()
        assert len(casts.cache) == kept
        assert not is_functorch_wrapped_tensor(casts.to_half(parameter))
        assert len(casts.cache) == kept + 1


def test_a_cast_in_inference_mode_has_a_version(casts: CastState) -> None:
    parameter = Parameter(torch.ones(2))
    with torch.inference_mode():
        casts.to_half(parameter)
        first = casts.to_half(parameter)
        assert casts.to_half(parameter) is first
        first.mul_(2)
    assert torch.equal(casts.to_half(parameter), parameter.half())


# -- the last activation --


def shared(casts: CastState, tensor: Tensor) -> Tensor:
    (cast,) = casts.args_to_half([tensor])
    assert isinstance(cast, Tensor)
    return cast


def test_the_last_activation_is_cast_once(casts: CastState) -> None:
    x, other = torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True)
    first = shared(casts, x)
    # States of a recurrent layer come in a tuple. One in another container is not kept, nor one that is cast by itself.
    assert casts.args_to_half([(x,)])[0][0] is first
    casts.args_to_half([{"other": other}, [1, other]])
    casts.to_half(other)
    assert shared(casts, x) is first
    assert casts.thread.param_casts == {}
    shared(casts, other)
    assert shared(casts, x) is not first
    casts.thread.param_casts = None
    assert shared(casts, x) is not shared(casts, x)
    off = make(enable_caching=False)
    assert shared(off, x) is not shared(off, x)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, value: x.copy_(value),
        lambda x, value: x.detach().copy_(value),
        lambda x, value: x[:1].copy_(value[:1]),
        lambda x, value: x.view(2, 1).mul_(0).add_(value.view(2, 1)),
        lambda x, value: setattr(x, "data", value.clone()),
        lambda x, value: x.set_(value.clone()),
    ],
    ids=["copy_", "detach", "slice", "view", "data", "set_"],
)
def test_an_activation_that_was_written_to_is_cast_anew(
    casts: CastState, write: Callable[[Tensor, Tensor], Any]
) -> None:
    x = torch.zeros(2, requires_grad=True) * 1
    shared(casts, x)
    with torch.no_grad():
        write(x, torch.ones(2))
    assert torch.equal(shared(casts, x), x.half())


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("of_weight", [True, False], ids=["weight", "activation"])
def test_a_cast_has_a_gradient_only_where_gradients_are_on(
    casts: CastState, first: str, second: str, of_weight: bool
) -> None:
    leaf = Parameter(torch.ones(2))
    x = leaf if of_weight else leaf * 1
    with MODES[first]():
        for _ in range(2):
            shared(casts, x)
    with MODES[second]():
        cast = shared(casts, x)
    assert cast.requires_grad == (second == "grad")
    if second == "grad":
        cast.float().sum().backward()
        assert leaf.grad is not None


def test_a_cast_without_a_graph_is_not_shared_after_its_owner_asks_for_a_gradient(casts: CastState) -> None:
    leaf = torch.ones(2, requires_grad=True)
    x = leaf * 1
    with torch.no_grad():
        kept = shared(casts, x)
    kept.requires_grad_()
    shared(casts, x).float().sum().backward()
    assert leaf.grad is not None


def test_an_activation_without_a_version_is_cast_each_time(casts: CastState) -> None:
    with torch.inference_mode():
        x = torch.zeros(2)
        shared(casts, x)
        x.fill_(1.0)
        assert torch.equal(shared(casts, x), x.half())
    assert torch.equal(shared(casts, x.clone()), torch.ones(2).half())
    assert shared(casts, x) is not shared(casts, x)


# -- under a handle --


@pytest.fixture
def handle() -> Iterator[autoamp.Handle]:
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    yield handle
    handle.deactivate()


class Calls(nn.Module):
    """A module whose forward is a function of it."""

    def __init__(self, function: Callable[..., Any], size: int = 2) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        for layer in (self.a, self.b):
            nn.init.eye_(layer.weight)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@autoamp.half_function
def doubles(value: Tensor) -> Tensor:
    """Writes to what it is given, which is a cast."""
    return value.mul_(2)


@autoamp.half_function
def transposed(value: Tensor) -> Tensor:
    """Returns a view of what it is given, which is a cast."""
    return value.t()


@pytest.mark.parametrize("of_weight", [True, False], ids=["weight", "activation"])
def test_a_cast_that_was_written_to_is_made_anew(handle: autoamp.Handle, of_weight: bool) -> None:
    def run(self: Calls, x: Tensor) -> list[float]:
        given = self.a.weight if of_weight else x * 1
        return [doubles(given)[0, 0].item() for _ in range(4)]

    x = torch.ones(2, 2, requires_grad=True)
    model = Calls(run)
    assert model(x) == [2.0] * 4
    with torch.no_grad(), handle.inference(model):
        assert model(x) == [2.0] * 4
        # A view of a cast is as good as the cast.
        for _ in range(3):
            transposed(model.a.weight).mul_(2)
            assert torch.equal(model.a(x), torch.ones(2, 2, dtype=HALF))


def test_a_detached_tensor_is_cast_anew(handle: autoamp.Handle) -> None:
    found: list[Tensor] = []

    def run(self: Calls, x: Tensor) -> Tensor:
        y = x * 1
        self.a(y)
        found.append(y.detach_().requires_grad_())
        return self.b(y)  # type: ignore[no-any-return]

    x = torch.ones(1, 2, requires_grad=True)
    Calls(run)(x).float().sum().backward()
    assert x.grad is None
    assert found[0].grad is not None


def test_a_write_of_numpy_reaches_the_next_cast(handle: autoamp.Handle) -> None:
    """As of numpy, or of a collective: a tensor without gradients is cast for each use."""

    def run(self: Calls, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.a(x)
        x.numpy()[:] = 2
        return before, self.b(x)

    before, after = Calls(run)(torch.ones(1, 2))
    assert before[0, 0].item() == 1.0
    assert after[0, 0].item() == 2.0


def test_fake_tensors_are_not_kept(handle: autoamp.Handle) -> None:
    layer, x = nn.Linear(96, 64), torch.randn(3, 96)
    expected = F.linear(x, layer.weight.detach(), layer.bias.detach())
    with torch.no_grad(), handle.inference(layer):
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert layer(torch.empty(3, 96)).shape == (3, 64)
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traces_hold_the_weights_and_no_casts(handle: autoamp.Handle) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    with torch.no_grad(), handle.inference(layer):
        layer(x)
        traced = torch.jit.trace(layer, x)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(1.0)
        assert torch.equal(traced(x), torch.ones(3, 4, dtype=HALF))


def test_a_model_that_changes_its_dtype_against_the_promise(handle: autoamp.Handle) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    with torch.no_grad(), handle.inference(layer):
        F.linear(x, weight=layer.weight)
        layer.double()
        assert F.linear(x.double(), weight=layer.weight).dtype is torch.float64
        assert layer(x.double()).dtype is torch.float64
