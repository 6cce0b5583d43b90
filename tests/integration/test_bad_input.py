"""Random arguments through every policy: never a wrong value, never a mutated argument, torch's own exceptions."""

from __future__ import annotations

import collections
import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import autoamp

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool,
]  # fmt: skip
HALF = torch.float16
FLOATS = {torch.float16, torch.bfloat16, torch.float32}
# The fixtures hold for all examples of a test: a handle, which no example changes.
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Pair(NamedTuple):
    first: Any
    second: Any


class Named(dict[str, Any]):
    """A dict of a class of its own."""


def tensor(dtype: torch.dtype, device: str, shape: tuple[int, ...], form: str) -> Tensor:
    """A small tensor of a dtype, device, shape and form."""
    numbers = torch.arange(1, math.prod(shape) + 1).reshape(shape) / 4
    found = numbers.to(dtype).to(device)
    if form == "transposed" and len(shape) > 1:
        return found.transpose(0, 1)
    if form == "parameter" and dtype in FLOATS:
        return torch.nn.Parameter(found)
    if form == "sparse" and device == "cpu" and dtype not in (torch.bool, torch.uint8):
        return found.to_sparse()
    return found


shapes = st.sampled_from([(), (1,), (2,), (2, 2), (1, 3), (0,)])
dense = st.builds(
    tensor,
    st.sampled_from(DTYPES),
    st.sampled_from(["cpu", "cpu", "meta"]),
    shapes,
    st.sampled_from(["plain", "plain", "transposed", "parameter"]),
)
junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(-2, 2), st.text(max_size=3), st.just(object()),
    st.just(torch.float32), st.just(torch.Size([2])), st.just(Ellipsis), st.just(len), st.just({1, 2}),
)  # fmt: skip


def nests(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Leaves in lists, tuples, named tuples and dicts of several classes."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(Named),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(collections.OrderedDict),
            st.lists(inner, max_size=2).map(lambda items: collections.deque(items)),
        ),
        max_leaves=6,
    )


def picture(value: Any) -> Any:
    """All of an argument that a call might change, containers included."""
    if isinstance(value, Tensor):
        numbers = None if value.is_meta else value.detach().to(torch.complex128).to_dense().tolist()
        return id(value), value.dtype, value._version, str(numbers), value.requires_grad
    if isinstance(value, dict):
        return id(value), type(value), [(key, picture(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return id(value), type(value), [picture(item) for item in value]
    return id(value)


@pytest.fixture
def plain() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Patch torch for the test, and return what takes the casts away for a block."""
    return autoamp.init(device_type="cpu", dtype=HALF, lists=LISTS).disable_casts


# Looked up at each call, since patches come and go. With the policy by the default set, and the number of arguments.
OPS: dict[str, tuple[str, int, Callable[..., Any]]] = {
    "linear": ("fp16", 2, lambda *args, **kwargs: F.linear(*args, **kwargs)),
    "mm": ("fp16", 2, lambda *args, **kwargs: torch.mm(*args, **kwargs)),
    "matmul": ("fp16", 2, lambda *args, **kwargs: torch.matmul(*args, **kwargs)),
    "prelu": ("fp16", 2, lambda *args, **kwargs: F.prelu(*args, **kwargs)),
    "exp": ("fp32", 1, lambda *args, **kwargs: torch.exp(*args, **kwargs)),
    "softmax": ("fp32", 1, lambda *args, **kwargs: F.softmax(*args, dim=0, **kwargs)),
    "mse_loss": ("fp32", 2, lambda *args, **kwargs: F.mse_loss(*args, **kwargs)),
    "pow": ("fp32", 2, lambda *args, **kwargs: torch.pow(*args, **kwargs)),
    "sum": ("fp32", 1, lambda *args, **kwargs: torch.sum(*args, **kwargs)),
    "cdist": ("fp32", 2, lambda *args, **kwargs: torch.cdist(*args, **kwargs)),
    "batch_norm": ("none", 3, lambda *args, **kwargs: F.batch_norm(*args, **kwargs)),
    "cat": ("promote", 2, lambda *args, **kwargs: torch.cat(*args, **kwargs)),
    "addcmul": ("promote", 3, lambda *args, **kwargs: torch.addcmul(*args, **kwargs)),
    "dot": ("promote", 2, lambda *args, **kwargs: torch.dot(*args, **kwargs)),
    "index_add": ("promote", 3, lambda *args, **kwargs: torch.index_add(*args[:1], 0, *args[1:], **kwargs)),
    "binary_cross_entropy": ("banned", 2, lambda *args, **kwargs: F.binary_cross_entropy(*args, **kwargs)),
    "add": ("none", 2, lambda *args, **kwargs: torch.add(*args, **kwargs)),
    "relu": ("none", 1, lambda *args, **kwargs: F.relu(*args, **kwargs)),
}
LISTS = {"extends": "default", "promote": ["cat"]}


def outcome(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **kwargs)
        except Exception as error:  # whatever torch raises is to be compared
            return error


def same(first: Any, second: Any, *, values: bool) -> bool:
    if not isinstance(first, Tensor):
        return type(first) is type(second)
    if first.dtype != second.dtype or first.shape != second.shape or first.device != second.device:
        return False
    if first.is_meta or not values:
        return True
    pair = [item.detach().to_dense().to(torch.complex128).nan_to_num() for item in (first, second)]
    return torch.equal(*pair)


@pytest.mark.parametrize("name", OPS)
@quick
@given(
    st.lists(nests(st.one_of(dense, junk)), max_size=4),
    st.dictionaries(st.sampled_from(["input", "nosuch", "dtype"]), nests(st.one_of(dense, junk)), max_size=1),
)
def test_nonsense_is_refused_in_torchs_words(name: str, plain: Any, args: list[Any], kwargs: Any) -> None:
    function = OPS[name][2]
    with plain():
        control = outcome(function, args, kwargs)
    if not isinstance(control, TypeError):
        return  # it was no nonsense, or its words tell of a dtype, which a cast may change
    before = [picture(args), picture(kwargs)]

    got = outcome(function, args, kwargs)

    assert type(got) is TypeError, repr(got)
    assert [picture(args), picture(kwargs)] == before
    for text in ("replacement", "autoamp", "wrapper"):
        assert text not in str(got)
    assert (name in str(got)) == (name in str(control))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("out", [[], (), 3, "x", [None]], ids=repr)
def test_an_out_that_is_no_tensor_is_torchs_to_refuse(out: Any) -> None:
    x = torch.ones(2, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"exp\(\)"):
        torch.exp(x, out=out)
    with pytest.raises(TypeError, match="mse_loss"):
        F.mse_loss(x, x, out=out)  # type: ignore[call-arg]


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def deep() -> list[Any]:
    found: list[Any] = [torch.ones(2)]
    for _ in range(5000):
        found = [found]
    return found


@pytest.mark.parametrize("make", [cyclic, deep])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda nest: torch.exp(nest), r"exp\(\): argument 'input' .* must be Tensor, not list"),
        (lambda nest: torch.mm(torch.ones(2, 2), nest), r"mm\(\): argument 'mat2' .* must be Tensor, not list"),
        (lambda nest: torch.cat(nest), "expected Tensor as element 0 in argument 0, but got list"),
        (lambda nest: torch.addcmul(torch.ones(2), nest, torch.ones(2)), r"addcmul\(\): argument 'tensor1' "),
        (lambda nest: torch.ones(2).index_put_(nest, torch.ones(2)), "expected Tensor as element 0 in argument 0"),
    ],
)
def test_endless_nests_are_torchs_to_refuse(make: Callable[[], Any], call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(make())
    autoamp.init(device_type="cpu", dtype=torch.float16, lists=LISTS)
    with pytest.raises(TypeError, match=message):
        call(make())
