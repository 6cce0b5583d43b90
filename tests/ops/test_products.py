"""Ops that torch's autocast casts for the one call: the results of casts by hand, and no trace afterwards."""

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
from autoamp.casting.casts import Casts
from autoamp.ops.products import COMPOSITES, HALF_OPS, build_composite
from tests.ops.by_hand import LISTS, NAMES, Call, check_by_hand, check_mixtures

FULL = torch.float32
HALVES = torch.float16, torch.bfloat16


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


# Of two tensors, of two of which one is a parameter, and of three: each has a way of its own to autocast.
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


def test_every_name_was_found() -> None:
    assert len(NAMES) == 14
    assert "linear" in NAMES


# -- composites --


def test_composites_run_under_autocast_where_an_argument_is_half(half: torch.dtype) -> None:
    casts, general = Casts(half, "cpu"), []
    casts.open()
    seen: list[tuple[bool, bool, torch.dtype]] = []
    other = HALVES[HALVES[0] is half]
    torch.set_autocast_dtype("cpu", other)

    def within(*args: Any, **kwargs: Any) -> Any:
        seen.append(
            (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), torch.get_autocast_dtype("cpu"))
        )
        return F.cross_entropy(*args, **kwargs)

    def otherwise(*args: Any, **kwargs: Any) -> None:
        general.append((args, kwargs))

    replacement = build_composite(within, otherwise, casts)
    x, labels = torch.randn(4, 8).to(half), torch.arange(4)
    loss = replacement(x, labels, reduction="sum")
    assert (loss.dtype, seen, general) == (torch.float32, [(True, False, half)], [])
    assert torch.equal(loss, F.cross_entropy(x.float(), labels, reduction="sum"))
    replacement(x.float(), labels)
    assert seen.pop() == (False, True, other)
    with pytest.raises((IndexError, ValueError)):
        replacement(x, torch.arange(5))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert torch.get_autocast_dtype("cpu") is other
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert not general
    for args in ((x, labels, x, None, 0, x), (x.to_sparse(), labels), (object(),)):
        replacement(*args, **({"out": x} if len(args) > 2 else {}))
    with torch.autocast("cpu", half):
        replacement(x, labels)
    assert len(general) == 4


def test_cuda_has_composites_of_its_own() -> None:
    assert {F.cross_entropy, torch.trapezoid, torch.Tensor.trace} <= COMPOSITES
    assert HALF_OPS.isdisjoint(COMPOSITES)
