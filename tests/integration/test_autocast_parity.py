"""Parity with torch's own autocast: its test lists for CUDA, run on CPU tensors in fp16 under the default list set."""

from __future__ import annotations

import dataclasses
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

import autoamp

HALF, FP32 = torch.float16, torch.float32

LIST_DTYPES = {
    "torch_fp16": HALF,
    "nn_fp16": HALF,
    "linalg_fp16": HALF,
    "methods_fp16": HALF,
    "torch_fp32": FP32,
    "nn_fp32": FP32,
    "methods_fp32": FP32,
    "torch_need_autocast_promote": FP32,
}

SPELLINGS: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "linalg": torch.linalg,
    "special": torch.special,
    "Tensor": Tensor,
    "_VF": torch._VF,
}

# What plain torch cannot run with the list's arguments on CPU tensors, so that there is nothing to compare with.
CANNOT_RUN = {
    "torch_fp16-10-torch.cudnn_convolution": "needs cuDNN",
    "torch_fp16-10-_VF.cudnn_convolution": "needs cuDNN",
    "torch_fp16-11-torch.cudnn_convolution_transpose": "needs cuDNN",
    "torch_fp16-11-_VF.cudnn_convolution_transpose": "needs cuDNN",
    "torch_fp16-17-torch.einsum": "the list's equation does not fit its operands; test_einsum has one that does",
    "torch_fp32-23-linalg.norm": "takes ord=, not p=",
    "torch_fp32-24-linalg.norm": "takes ord=, not p=",
    "torch_fp32-30-F.margin_ranking_loss": "wants a target of the inputs' rank",
}


def torch_lists() -> types.ModuleType:
    """Load torch's lists without the test helpers they import, which change global flags and need more packages."""
    helpers = types.ModuleType("torch.testing._internal.common_utils")
    vars(helpers).update(TEST_WITH_ROCM=False, TestCase=object)
    name = "torch.testing._internal.autocast_test_lists"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {helpers.__name__: helpers}):
        spec.loader.exec_module(module)
    return module


LISTS = torch_lists()
with torch.random.fork_rng():
    torch.manual_seed(0)
    CUDA = LISTS.AutocastTestLists("cpu")

# Python reaches these only by another name.
PUBLIC_NAMES = {"nll_loss2d": "nll_loss", "linalg_vecdot": "vecdot", "linalg_multi_dot": "multi_dot"}


def spelled(op: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every place at which Python sees an op."""
    name = PUBLIC_NAMES.get(op, op)
    for spelling, owner in SPELLINGS.items():
        # Where torch wraps an op of torch._VF in Python, with another signature, nobody else calls the op below.
        wrapped = owner is torch._VF and isinstance(getattr(torch, name, None), types.FunctionType)
        if hasattr(owner, name) and not wrapped:
            yield spelling, lambda *args, owner=owner, **kwargs: getattr(owner, name)(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Case:
    """One entry of a list under one spelling."""

    name: str
    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, dtype: torch.dtype | None = None) -> Any:
        """Call it, on args cast by hand where a dtype is given."""
        return self.function(*(self.args if dtype is None else cast(self.args, dtype)), **self.kwargs)


def cases(name: str) -> list[Case]:
    found = []
    for index, (op, args, *rest) in enumerate(getattr(CUDA, name)):
        kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
        before = len(found)
        found += [
            Case(f"{name}-{index}-{spelling}.{op}", op, function, args, kwargs) for spelling, function in spelled(op)
        ]
        assert len(found) > before, f"{op} has no spelling that Python sees"
    return found


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    return value


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first.nan_to_num(), second.nan_to_num())
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def dtypes(value: Any) -> set[torch.dtype]:
    return {value.dtype} if isinstance(value, Tensor) else {item.dtype for item in value}


def start(half: torch.dtype) -> autoamp.Handle:
    handle = autoamp.init(device_type="cpu", dtype=half, lists="default")
    assert isinstance(handle, autoamp.Handle)
    return handle


def differences(cases: list[Case], expected: list[Any], dtype: torch.dtype) -> list[str]:
    """Run the cases under autoamp and name those that differ in dtype or in a bit."""
    start(HALF)
    outputs = [case.run() for case in cases]
    return [
        f"{case.name}: {dtypes(output)}"
        for case, output, reference in zip(cases, outputs, expected, strict=True)
        if dtypes(output) != {dtype} or not same(output, reference)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIST_DTYPES)
def test_dtype_and_value_equal_args_cast_by_hand(name: str) -> None:
    dtype = LIST_DTYPES[name]
    # addr promotes: it is an outer product.
    runnable = [case for case in cases(name) if case.name not in CANNOT_RUN and case.op != "addr"]
    assert not differences(runnable, [case.run(dtype) for case in runnable], dtype)


@pytest.mark.filterwarnings("ignore")
def test_ops_that_torch_cannot_run_in_a_dtype_raise() -> None:
    entries = {case.name: (case, dtype) for name, dtype in LIST_DTYPES.items() for case in cases(name)}
    for name in CANNOT_RUN:
        case, dtype = entries[name]
        with pytest.raises((RuntimeError, TypeError)):
            case.run(dtype)


@pytest.mark.parametrize(
    ("name", "owner"), [("torch_expect_builtin_promote", torch), ("methods_expect_builtin_promote", Tensor)]
)
def test_what_promotes_by_itself_still_does(name: str, owner: Any) -> None:
    # Python 3 has no __div__.
    entries = [entry for entry in getattr(CUDA, name) if entry[0] != "__div__"]
    assert len(entries) > 7
    control = [getattr(owner, op)(*args) for op, args, _ in entries]

    start(HALF)

    for (op, args, dtype), reference in zip(entries, control, strict=True):
        output = getattr(owner, op)(*args)
        assert same(output, reference), op
        # `equal` answers with a bool.
        assert isinstance(output, bool) or output.dtype == dtype, op
