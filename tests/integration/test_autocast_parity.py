"""Parity with torch's own autocast: its test lists for CUDA, run on CPU tensors in fp16 under the default list set."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import autoamp

HALF, FP32 = torch.float16, torch.float32

# By list: the dtype of its results, and how many of its calls plain torch cannot run on CPU tensors. Those of cuDNN, an
# equation that does not fit its operands (test_einsum has one that does), `linalg.norm` with `p=`, and a target of
# `margin_ranking_loss` that is not of the inputs' rank.
LISTS = {
    "torch_fp16": (HALF, 5), "nn_fp16": (HALF, 0), "linalg_fp16": (HALF, 0), "methods_fp16": (HALF, 0),
    "torch_fp32": (FP32, 3), "nn_fp32": (FP32, 0), "methods_fp32": (FP32, 0), "torch_need_autocast_promote": (FP32, 0),
}  # fmt: skip
SPELLINGS: tuple[Any, ...] = (torch, F, torch.linalg, torch.special, Tensor, torch._VF)
# Python reaches these only by another name.
PUBLIC_NAMES = {"nll_loss2d": "nll_loss", "linalg_vecdot": "vecdot", "linalg_multi_dot": "multi_dot"}


def torch_lists() -> types.ModuleType:
    """Load torch's lists without the test helpers they import, which change global flags and need more packages."""
    helpers = types.ModuleType("torch.testing._internal.common_utils")
    vars(helpers).update(TEST_WITH_ROCM=False, TestCase=object)
    spec: Any = importlib.util.find_spec("torch.testing._internal.autocast_test_lists")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {helpers.__name__: helpers}):
        spec.loader.exec_module(module)
    return module


with torch.random.fork_rng():
    torch.manual_seed(0)
    CUDA = torch_lists().AutocastTestLists("cpu")


def calls(name: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Yield each entry of a list under each spelling that Python sees, looked up at the call."""
    for op, args, *rest in getattr(CUDA, name):
        kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
        public, found = PUBLIC_NAMES.get(op, op), 0
        for owner in SPELLINGS:
            # Where torch wraps an op of torch._VF in Python, with another signature, nobody else calls the op below.
            wrapped = owner is torch._VF and isinstance(getattr(torch, public, None), types.FunctionType)
            # addr promotes: it is an outer product.
            if hasattr(owner, public) and not wrapped and op != "addr":
                yield f"{owner.__name__}.{op}", _looked_up(owner, public), args, kwargs
                found += 1
        assert found or op == "addr", f"{op} has no spelling that Python sees"


def _looked_up(owner: Any, name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def by_hand(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Call plain torch on arguments that are cast; None where it cannot run."""
    is_float = lambda leaf: isinstance(leaf, Tensor) and leaf.is_floating_point()  # noqa: E731
    try:
        return function(*tree_map(lambda leaf: leaf.to(dtype) if is_float(leaf) else leaf, args), **kwargs)
    except (RuntimeError, TypeError):
        return None


def same(first: Any, second: Any) -> bool:
    """Whether results are bitwise equal, and of one dtype."""
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return all(
        one.dtype is other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        if isinstance(one, Tensor)
        else one == other
        for one, other in pairs
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LISTS)
def test_dtype_and_value_equal_args_cast_by_hand(name: str) -> None:
    dtype, cannot_run = LISTS[name]
    control = [(call, by_hand(*call[1:], dtype)) for call in calls(name)]
    runnable = [(call, expected) for call, expected in control if expected is not None]
    assert len(control) - len(runnable) == cannot_run
    autoamp.init(device_type="cpu", dtype=HALF, lists="default")
    for (spelling, function, args, kwargs), expected in runnable:
        found = function(*args, **kwargs)
        assert {leaf.dtype for leaf in tree_leaves(found)} == {dtype}, spelling
        assert same(found, expected), spelling


@pytest.mark.parametrize(
    ("name", "owner"), [("torch_expect_builtin_promote", torch), ("methods_expect_builtin_promote", Tensor)]
)
def test_what_promotes_by_itself_still_does(name: str, owner: Any) -> None:
    # Python 3 has no __div__.
    entries = [entry for entry in getattr(CUDA, name) if entry[0] != "__div__"]
    assert len(entries) > 7
    control = [getattr(owner, op)(*args) for op, args, _ in entries]
    autoamp.init(device_type="cpu", dtype=HALF, lists="default")
    for (op, args, dtype), reference in zip(entries, control, strict=True):
        output = getattr(owner, op)(*args)
        assert same(output, reference), op
        # `equal` answers with a bool.
        assert isinstance(output, bool) or output.dtype == dtype, op
