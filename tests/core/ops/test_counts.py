"""What the casts count by themselves, beside the exact counts of an observer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autoamp
from autoamp.core import runtime_of
from autoamp.tensors import dtype_name

HALF, FP32 = torch.float16, torch.float32
LISTS: dict[str, Any] = {"extends": ["default"], "promote": ["cat"]}
X, W = torch.randn(3, 4), torch.randn(4, 4)
# A call with the numbers of calls under the policies half, fp32 and promote, and of casts to half and to fp32.
CALLS: dict[str, tuple[Callable[[], Any], tuple[int, int, int], tuple[int, int]]] = {
    "half": (lambda: F.linear(X, W), (1, 0, 0), (2, 0)),
    "half by name": (lambda: F.linear(input=X, weight=W, bias=None), (1, 0, 0), (2, 0)),
    "nothing to cast": (lambda: F.linear(X.half(), W.half()), (1, 0, 0), (0, 0)),
    "fp32": (lambda: torch.cosine_similarity(X.half(), X.half()), (0, 1, 0), (0, 2)),
    "promotes": (lambda: torch.cat([X, X.half()]), (0, 0, 1), (0, 1)),
    "promotes nothing": (lambda: torch.cat([X, X]), (0, 0, 1), (0, 0)),
    "into fp32": (lambda: torch.mm(X, W, out=torch.empty(3, 4)), (1, 0, 0), (0, 0)),
    "doubles": (lambda: F.linear(X.double(), W.double()), (1, 0, 0), (0, 0)),
    "off": (lambda: autoamp.disable_casts()(lambda: F.linear(X, W))(), (0, 0, 0), (0, 0)),
    "on no list": (lambda: torch.relu(X), (0, 0, 0), (0, 0)),
}


def numbers(handle: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    casts = runtime_of(handle).casts
    assert list(casts.counts.calls) == ["half", "fp32", "promote"]
    calls, made = casts.counts.calls, casts.counts.made
    return tuple(count for (count,) in calls.values()), (made[HALF][0], made[FP32][0])


@pytest.mark.parametrize("name", CALLS)
def test_casts_count_calls_by_policy_and_arguments_by_dtype(name: str) -> None:
    call, calls, casts = CALLS[name]
    handle = autoamp.init(device_type="cpu", dtype=HALF, lists=LISTS)
    call()
    assert numbers(handle) == (calls, casts)


def test_the_counts_of_a_training_are_the_exact_ones() -> None:
    handle = autoamp.init(device_type="cpu", dtype=HALF, scope="modules")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    with handle.count() as counts:
        for _ in range(2):
            F.cross_entropy(model(X), torch.tensor([0, 1, 2])).backward()
    calls, made = numbers(handle)
    exact: Counter[str] = Counter()
    for (_, after), count in counts.casts.items():
        exact[after] += count
    assert sum(calls) == sum(counts.by_dtype().values())
    assert {dtype_name(HALF): made[0], dtype_name(FP32): made[1]} == {"float16": 0, "float32": 0, **exact}


def test_calls_in_an_autocast_region_of_the_program_are_torchs() -> None:
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    with torch.autocast("cpu"):
        F.linear(X, W)
    assert numbers(handle) == ((0, 0, 0), (0, 0))


def test_compiled_code_is_not_counted_and_has_no_side_effect() -> None:
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    compiled = torch.compile(lambda x: F.linear(x, W).float().exp(), backend="eager", fullgraph=True)
    compiled(X)
    compiled(X)
    assert numbers(handle) == ((0, 0, 0), (0, 0))
