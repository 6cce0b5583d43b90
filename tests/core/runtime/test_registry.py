"""Decorators and registrations: functions that no list names."""

from __future__ import annotations

import abc
import gc
import inspect
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.core import Handle
from tests.core.runtime import shared
from tests.core.runtime.shared import HALF, ones


def init(**changes: Any) -> Handle:
    return shared.init(**{"rebind": True, **changes})


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """A module of somebody else, of whose function ``nms`` a second module has taken the name."""
    library, user = types.ModuleType("some_library"), types.ModuleType("some_user")
    exec("def nms(boxes, scores=None):\n    return boxes.dtype\n", vars(library))
    user.taken = library.nms  # type: ignore[attr-defined]
    sys.modules["some_library"], sys.modules["some_user"] = library, user
    yield library
    del sys.modules["some_library"], sys.modules["some_user"]


# -- decorators --


@autoamp.half_function
def module_level(x: Tensor, *others: Tensor) -> torch.dtype:
    """The dtype that arrives."""
    return x.dtype


def test_a_decorated_function_keeps_name_docstring_signature_and_pickles() -> None:
    assert (module_level.__name__, module_level.__doc__) == ("module_level", "The dtype that arrives.")
    assert str(inspect.signature(module_level)) == "(x: 'Tensor', *others: 'Tensor') -> 'torch.dtype'"
    assert pickle.loads(pickle.dumps(module_level)) is module_level


class Net(nn.Module):
    @autoamp.half_function
    def forward(self, x: Tensor) -> torch.dtype:
        return x.dtype

    def plain(self, x: Tensor) -> torch.dtype:
        return x.dtype


class Outside(torch.autograd.Function):
    """Decorated above and below ``staticmethod``."""

    @autoamp.float_function
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return x * 2

    @staticmethod
    @autoamp.float_function
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert grad.dtype is torch.float32
        return grad * 2


class Abstract(abc.ABC):
    @autoamp.half_function
    @abc.abstractmethod
    def below(self, x: Tensor) -> torch.dtype: ...

    @abc.abstractmethod
    @autoamp.half_function
    def above(self, x: Tensor) -> torch.dtype: ...

    @autoamp.half_function
    @classmethod
    def made(cls, x: Tensor) -> torch.dtype:
        return x.dtype


def test_methods_and_bound_methods() -> None:
    net = Net()
    bound = autoamp.half_function(net.plain)
    init()
    assert net(ones()) == HALF
    assert bound(ones()) == HALF
    assert net.plain(ones()) == torch.float32
    assert Abstract.made(ones()) == HALF


def test_abstract_methods_stay_abstract() -> None:
    assert Abstract.__abstractmethods__ == {"below", "above"}


def test_builtins_and_callable_objects() -> None:
    class Adds:
        def __call__(self, x: Tensor) -> Tensor:
            return x + 1

    init()
    assert autoamp.half_function(torch.add)(ones(), ones()).dtype == HALF
    assert autoamp.half_function(Adds())(ones()).dtype == HALF


def test_a_decorated_function_is_collectable() -> None:
    init()
    decorated = autoamp.half_function(lambda x: x)
    decorated(ones())
    reference = weakref.ref(decorated)
    del decorated
    gc.collect()
    assert reference() is None


# -- registrations --


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_registration_holds_now_and_at_each_later_init(when: str, library: types.ModuleType) -> None:
    nms, user = library.nms, sys.modules["some_user"]
    if when == "after":
        init()
    autoamp.register_half_function(library, "nms")
    for dtype in (HALF, torch.bfloat16):
        handle = init(dtype=dtype)
        assert library.nms(ones()) == dtype
        assert library.nms(boxes=ones()) == dtype
        assert user.taken is library.nms
        assert "some_user.taken" in handle.late_bound
    handle.deactivate()
    assert library.nms is nms
    assert user.taken is nms


def test_a_registration_stands_above_the_lists_and_a_later_one_above_an_earlier() -> None:
    linear = F.linear
    autoamp.register_float_function(F, "linear")
    handle = init()
    assert F.linear(ones(HALF), ones()).dtype == torch.float32
    autoamp.register_half_function(F, "linear")
    assert F.linear(ones(), ones()).dtype == HALF
    assert handle.deactivate() == ()
    assert F.linear is linear
    init()
    assert F.linear(ones(), ones()).dtype == HALF


def test_a_function_of_an_object_that_knows_no_module() -> None:
    library = types.SimpleNamespace(distance=lambda a, b: (a - b).square().sum())
    original = library.distance
    autoamp.register_float_function(library, "distance")
    handle = init()
    assert library.distance(ones(HALF), ones(HALF)).dtype == torch.float32
    handle.deactivate()
    assert library.distance is original


def test_a_class_of_modules_or_autograd_functions() -> None:
    here = sys.modules[__name__]
    autoamp.register_half_function(torch.nn, "MaxPool2d")
    autoamp.register_half_function(here, "Outside")
    before = dict(vars(torch.nn.MaxPool2d)), dict(vars(Outside))
    handle = init()
    assert torch.nn.MaxPool2d(1)(torch.ones(1, 1, 2, 2)).dtype == HALF
    assert Outside.apply(ones()).dtype == torch.float32
    handle.deactivate()
    assert (dict(vars(torch.nn.MaxPool2d)), dict(vars(Outside))) == before


class Below(torch.autograd.Function):
    """A custom function from which another one inherits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Above(Below):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3


def test_a_registered_custom_function_leaves_its_subclass_its_own() -> None:
    autoamp.register_half_function(sys.modules[__name__], "Below")
    handle = init()
    x = ones().requires_grad_()
    assert Below.apply(x).dtype == HALF
    y = Above.apply(x)
    y.sum().backward()
    assert torch.equal(y, 3 * ones())
    assert torch.equal(x.grad, 2 * ones())  # type: ignore[arg-type]
    handle.deactivate()


@pytest.mark.parametrize("early", [True, False])
def test_what_a_custom_function_is_called_by_can_be_decorated(early: bool) -> None:
    handle = None if early else init()
    apply = autoamp.float_function(Below.apply)
    handle = handle or init()
    assert apply(ones(HALF)).dtype == torch.float32
    assert autoamp.half_function(Below.apply)(ones()).dtype == HALF
    handle.deactivate()
    assert apply(ones(HALF)).dtype == HALF


def test_methods_static_methods_and_methods_of_one_object() -> None:
    class Toolbox:
        def method(self, x: Tensor) -> torch.dtype:
            return x.dtype

        @staticmethod
        def static(x: Tensor) -> torch.dtype:
            return x.dtype

        @classmethod
        def made(cls, x: Tensor) -> torch.dtype:
            assert cls is Toolbox
            return x.dtype

    one, other, before = Toolbox(), Toolbox(), dict(vars(Toolbox))
    for name in ("method", "static", "made"):
        autoamp.register_half_function(Toolbox, name)
    handle = init()
    assert (one.method(ones()), one.static(ones()), Toolbox.static(ones()), one.made(ones())) == (HALF,) * 4
    handle.deactivate()
    assert dict(vars(Toolbox)) == before
    autoamp.register_float_function(Toolbox, "method")
    autoamp.register_half_function(one, "method")
    handle = init()
    assert other.method(ones(HALF)) == torch.float32
    assert vars(other) == {}
    assert "method" in vars(one)
    handle.deactivate()
    assert vars(one) == {}


@pytest.mark.parametrize(
    ("module", "name"), [(torch, "float32"), (torch, "Tensor"), (int, "bit_length"), (torch, "__version__")]
)
def test_what_cannot_be_patched_is_a_value_error_and_spoils_nothing(module: Any, name: str) -> None:
    handle = init()
    with pytest.raises(ValueError, match="cannot be registered"):
        autoamp.register_half_function(module, name)
    assert handle.is_active()
    assert F.linear(ones(), ones()).dtype == HALF
    init(dtype=torch.bfloat16)


def test_a_name_that_is_gone_is_warned_of_and_the_rest_holds(library: types.ModuleType) -> None:
    autoamp.register_half_function(library, "nms")
    autoamp.register_half_function(torch, "sigmoid")
    del library.nms
    with pytest.warns(UserWarning, match=r"registration of 'some_library\.nms' has no effect"):
        init()
    assert torch.sigmoid(ones()).dtype == HALF


def test_what_cannot_be_decorated_says_what_to_decorate() -> None:
    def generator() -> Iterator[int]:
        yield 1

    for wrong, message in (
        (generator, "runs after the call has returned"),
        (torch.nn.Linear, "Linear is a class; decorate its method"),
        ("softmax", "'softmax' is not callable; a fp16 decorator takes a function"),
    ):
        with pytest.raises(TypeError, match=message):
            autoamp.half_function(wrong)
