"""Products of matrices under the policy fp16: the results of casts by hand, and torch's autocast as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

import autoamp
from tests.ops.by_hand import LISTS, Call, check_by_hand, check_mixtures

CALLS: dict[str, Call] = {
    "matmul": (lambda x, w: torch.matmul(x, w), [(3, 4), (4, 5)]),
    "Tensor.matmul": (lambda x, w: x.matmul(w), [(3, 4), (4, 5)]),
    "__matmul__": (lambda x, w: x @ w, [(3, 4), (4, 5)]),
    "mm": (lambda x, w: torch.mm(x, w), [(3, 4), (4, 5)]),
    "bmm": (lambda x, w: torch.bmm(x, w), [(2, 3, 4), (2, 4, 5)]),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w), [(5,), (3, 4), (4, 5)]),
    "baddbmm": (lambda b, x, w: torch.baddbmm(b, x, w), [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    "addbmm": (lambda b, x, w: torch.addbmm(b, x, w), [(3, 5), (2, 3, 4), (2, 4, 5)]),
}


@pytest.fixture(autouse=True)
def casts_to_half(half: torch.dtype) -> None:
    autoamp.init(device_type="cpu", dtype=half, lists=LISTS)


@pytest.mark.parametrize("parameters", [False, True], ids=["tensors", "parameters"])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_casts_by_hand(half: torch.dtype, name: str, parameters: bool) -> None:
    check_by_hand(half, CALLS[name], parameters)


@pytest.mark.parametrize("name", CALLS)
def test_some_arguments_in_half_already(half: torch.dtype, name: str) -> None:
    check_mixtures(half, CALLS[name])


def test_what_is_not_fp32_stays_as_it_was() -> None:
    double = torch.ones(2, 2, dtype=torch.float64)
    assert torch.mm(double, double).dtype is torch.float64
    whole = torch.ones(2, 2, dtype=torch.int64)
    assert torch.mm(whole, whole).dtype is torch.int64


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, y: torch.mm(x, y),
    "product with a parameter": lambda x, y: torch.mm(x, Parameter(y)),
    "sum of a product": lambda x, y: torch.addmm(torch.ones(1), x, y),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_error_leaves_autocast_off(half: torch.dtype, way: str) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        WAYS[way](torch.ones(2, 3), torch.ones(2, 2))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("way", WAYS)
def test_the_thread_s_own_autocast_settings_are_kept(half: torch.dtype, way: str) -> None:
    other = torch.bfloat16 if half is torch.float16 else torch.float16
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_cache_enabled(False)
    torch.set_autocast_dtype("cpu", other)
    try:
        assert WAYS[way](torch.ones(2, 2), torch.ones(2, 2)).dtype is half
        assert torch.get_autocast_dtype("cpu") is other
        assert not torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(True)
        torch.set_autocast_dtype("cpu", before)


@pytest.mark.parametrize("way", [*WAYS, "layer"])
def test_a_mode_sees_no_autocast(half: torch.dtype, way: str) -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return func(*args, **kwargs or {})

    call = {**WAYS, "layer": F.linear}[way]
    with Mode():
        assert call(torch.ones(2, 2), torch.ones(2, 2)).dtype is half
    assert seen
    assert not any(seen)


def test_torch_s_own_cache_of_casts_stays_out_of_it(half: torch.dtype) -> None:
    weight, x = torch.zeros(2, 2, requires_grad=True), torch.eye(2)
    first = torch.mm(x, weight)
    with torch.no_grad():
        weight.add_(1.0)
    assert torch.equal(torch.mm(x, weight), weight.detach().to(half))
    assert not first.any()


@pytest.mark.parametrize("other", [3, None, [1]], ids=str)
def test_an_operand_that_is_no_tensor_is_torch_s_own_error(half: torch.dtype, other: Any) -> None:
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for @"):
        torch.ones(2, 2) @ other
