"""Wrong arguments through every policy: torch's own exceptions, and no argument that is written to."""

from __future__ import annotations

import collections
import contextlib
import functools
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


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, tuples, named tuples and dicts of several classes."""
    items, named = st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    return st.one_of(
        *(items.map(kind) for kind in (list, tuple, collections.deque)),
        *(named.map(kind) for kind in (dict, Named, collections.OrderedDict)),
        st.builds(Pair, inner, inner),
    )


def picture(value: Any) -> Any:
    """All of an argument that a call might change, containers included."""
    if isinstance(value, Tensor):
        numbers = None if value.is_meta else value.detach().to(torch.complex128).to_dense().tolist()
        return id(value), value.dtype, value._version, str(numbers), value.requires_grad
    items = [*value, *value.values()] if isinstance(value, dict) else value
    is_container = isinstance(value, (dict, list, tuple, collections.deque))
    return id(value), [picture(item) for item in items] if is_container else None


@pytest.fixture
def plain() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Patch torch for the test, and return what takes the casts away for a block."""
    return autoamp.init(device_type="cpu", dtype=HALF, lists=LISTS).disable_casts


# By the policy of the default set, but for `cat`. Looked up at each call, since patches come and go.
OPS: dict[str, Callable[..., Any]] = {
    # fp16
    "linear": lambda *args, **kwargs: F.linear(*args, **kwargs),
    "mm": lambda *args, **kwargs: torch.mm(*args, **kwargs),
    "matmul": lambda *args, **kwargs: torch.matmul(*args, **kwargs),
    "prelu": lambda *args, **kwargs: F.prelu(*args, **kwargs),
    # fp32
    "exp": lambda *args, **kwargs: torch.exp(*args, **kwargs),
    "softmax": lambda *args, **kwargs: F.softmax(*args, dim=0, **kwargs),
    "mse_loss": lambda *args, **kwargs: F.mse_loss(*args, **kwargs),
    "pow": lambda *args, **kwargs: torch.pow(*args, **kwargs),
    "sum": lambda *args, **kwargs: torch.sum(*args, **kwargs),
    "cdist": lambda *args, **kwargs: torch.cdist(*args, **kwargs),
    # promote
    "cat": lambda *args, **kwargs: torch.cat(*args, **kwargs),
    "addcmul": lambda *args, **kwargs: torch.addcmul(*args, **kwargs),
    "dot": lambda *args, **kwargs: torch.dot(*args, **kwargs),
    "index_add": lambda *args, **kwargs: torch.index_add(*args[:1], 0, *args[1:], **kwargs),
    # banned, and left alone
    "binary_cross_entropy": lambda *args, **kwargs: F.binary_cross_entropy(*args, **kwargs),
    "batch_norm": lambda *args, **kwargs: F.batch_norm(*args, **kwargs),
    "add": lambda *args, **kwargs: torch.add(*args, **kwargs),
    "relu": lambda *args, **kwargs: F.relu(*args, **kwargs),
}
LISTS = {"extends": "default", "promote": ["cat"]}


def outcome(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **kwargs)
        except Exception as error:  # whatever torch raises is to be compared
            return error


nests = st.recursive(st.one_of(dense, junk), containers, max_leaves=6)


@pytest.mark.parametrize("name", OPS)
@quick
@given(st.lists(nests, max_size=4), st.dictionaries(st.sampled_from(["input", "nosuch", "dtype"]), nests, max_size=1))
def test_nonsense_is_refused_in_torchs_words(name: str, plain: Any, args: list[Any], kwargs: Any) -> None:
    function = OPS[name]
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


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP = functools.reduce(lambda nest, _: [nest], range(5000), [torch.ones(2)])


@pytest.mark.parametrize("nest", [CYCLE, DEEP], ids=["cycle", "deep"])
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
def test_endless_nests_are_torchs_to_refuse(nest: Any, call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(nest)
    autoamp.init(device_type="cpu", dtype=HALF, lists=LISTS)
    with pytest.raises(TypeError, match=message):
        call(nest)
