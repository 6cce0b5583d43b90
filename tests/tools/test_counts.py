"""Counts of calls and casts: what they say, that they are free when nobody asks, and that they end."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoamp


@pytest.fixture
def handle(short_lists: autoamp.Handle) -> autoamp.Handle:
    return short_lists


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2, 2)


def test_calls_by_function_and_dtype_and_their_casts(handle: autoamp.Handle, x: torch.Tensor) -> None:
    layer = nn.Linear(2, 2)
    with handle.count() as counts:
        for _ in range(3):
            hidden = layer(x)
        F.softmax(hidden, -1)
        hidden.exp_()
        torch.cat([x, hidden])
        torch.cat([x, x])
        torch.sigmoid(hidden)
    # F.softmax is a Python function, which calls Tensor.softmax; that is one.
    assert counts.ops == {
        "torch.Tensor.exp_": {"float32": 1},
        "torch.cat": {"float32": 2},
        "torch.nn.functional.linear": {"float16": 3},
        "torch.nn.functional.softmax": {"float32": 1},
    }
    # Weight, bias and input, three times.
    assert counts.casts == {("float32", "float16"): 9, ("float16", "float32"): 3}
    assert counts.by_dtype() == {"float16": 3, "float32": 4}
    assert json.loads(json.dumps(counts.as_dict()))["casts"] == {"float16->float32": 3, "float32->float16": 9}


def test_what_is_not_cast_is_counted_as_it_is(handle: autoamp.Handle, x: torch.Tensor) -> None:
    with handle.count() as counts:
        with handle.disable_casts():
            F.linear(x, x)
        F.linear(x.double(), x.double())
        F.linear(x.half(), x.half())
        F.embedding(torch.tensor([0]), x)
    assert counts.ops == {"torch.nn.functional.linear": {"float16": 1, "float64": 1}}
    assert counts.casts == {}


def test_it_ends_and_the_numbers_stay(handle: autoamp.Handle, x: torch.Tensor) -> None:
    plain = F.linear
    counts = handle.count()
    assert handle.count() is counts
    assert counts.active
    F.linear(x, x)
    held = F.linear
    counts.stop()
    counts.stop()
    assert not counts.active
    assert type(F.linear) is type(plain)
    # Nor does what was installed before it ended.
    for linear in (F.linear, held):
        assert linear(x, x).dtype is torch.float16
    assert counts.by_dtype() == {"float16": 1}
    again = handle.count()
    assert again is not counts
    handle.deactivate()
    assert not again.active
    assert F.linear(x, x).dtype is torch.float32
    with pytest.raises(autoamp.UsageError, match="not active"):
        handle.count()


def test_names_registrations_and_scaling_outlive_it(handle: autoamp.Handle, x: torch.Tensor) -> None:
    user: Any = types.ModuleType("took_linear")
    user.linear, user.custom = F.linear, lambda value: value
    sys.modules[user.__name__] = user
    try:
        autoamp.register_half_function(user, "custom")
        scaling = handle.auto_scale()
        with handle.count() as counts:
            assert user.linear(x, x).dtype is torch.float16
            user.meanwhile = F.linear
            user.custom(x)
        assert counts.by_dtype() == {"float16": 2}
        assert scaling.active
        assert user.linear is F.linear
        assert user.meanwhile(x, x).dtype is torch.float16
        assert user.custom(x).dtype is torch.float16
        handle.deactivate()
        assert user.linear(x, x).dtype is torch.float32
    finally:
        del sys.modules[user.__name__]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_compiled_code_is_neither_counted_nor_traced(handle: autoamp.Handle, x: torch.Tensor) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with handle.count() as counts, handle.trace() as trace:
        compiled = torch.compile(nn.Linear(2, 2), backend=backend, fullgraph=True)
        assert compiled(x).dtype is torch.float16
        assert torch.jit.script(nn.Linear(2, 2))(x).dtype is torch.float16
    assert (counts.ops, trace.rows, len(graphs)) == ({}, (), 1)
    torch._dynamo.reset()
