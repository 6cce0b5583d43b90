"""Scales that only the device knows give what floats give, bit for bit."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

from autoamp.scaling.device_scale import (
    DeviceFactor,
    DeviceScale,
    Factor,
    inverse_scale,
    multiplied_loss,
    number_of,
    scale_ratio,
)

CPU = torch.device("cpu")
SCALES = [2.0**16, 1000.0, 0.3000000119, 2.0**-126, 2.0**126, 7.0]


def on_device(scale: float, lowest: float = 0.5) -> DeviceScale:
    return DeviceScale(torch.tensor(scale), lowest)


def fp32(scale: float) -> float:
    return torch.tensor(scale).item()


def value(factor: Factor, dtype: torch.dtype) -> float:
    assert isinstance(factor, DeviceFactor)
    made = factor.on(CPU, dtype)
    assert (made.dtype, made.shape) == (dtype, ())
    assert factor.on(CPU, dtype) is made
    return made.item()


@pytest.mark.parametrize("scale", SCALES)
def test_an_inverse_is_that_of_the_float(scale: float) -> None:
    assert value(inverse_scale(on_device(scale)), torch.float32) == torch.tensor(1.0 / fp32(scale)).item()
    assert value(inverse_scale(on_device(scale)), torch.float64) == 1.0 / fp32(scale)
    assert inverse_scale(scale) == 1.0 / scale


@pytest.mark.parametrize("above", SCALES)
@pytest.mark.parametrize("below", SCALES)
def test_a_quotient_is_that_of_the_floats(above: float, below: float) -> None:
    exact = fp32(above) / fp32(below)
    factors = [
        scale_ratio(on_device(above), on_device(below)),
        scale_ratio(on_device(above), fp32(below)),
        scale_ratio(fp32(above), on_device(below)),
    ]
    assert [value(factor, torch.float64) for factor in factors] == [exact] * 3
    assert [value(factor, torch.float32) for factor in factors] == [torch.tensor(exact).item()] * 3


def test_a_scale_over_one_is_itself_and_over_itself_one() -> None:
    scale = on_device(1000.0)
    assert value(scale_ratio(scale, 1.0), torch.float32) == 1000.0
    assert scale_ratio(scale, scale) == 1.0
    assert scale_ratio(8.0, 2.0) == 4.0


def test_bounds() -> None:
    assert inverse_scale(on_device(8.0, lowest=4.0)).largest == 0.25  # type: ignore[union-attr]
    assert scale_ratio(on_device(8.0), 2.0).largest == math.inf  # type: ignore[union-attr]


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 1000.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_loss_is_multiplied_as_by_the_float(scale: float, dtype: torch.dtype) -> None:
    loss = torch.tensor(1.37, dtype=dtype, requires_grad=True)
    outcomes = []
    for given in (scale, on_device(scale)):
        loss.grad = None
        product = multiplied_loss(loss, given)
        product.backward()
        outcomes.append((product.dtype, product.item(), loss.grad))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] is torch.float32


def test_the_number_is_read_where_it_is_not_known() -> None:
    scale = on_device(1000.0)
    assert (f"{scale:g}", float(scale), scale.number.known) == ("1000", 1000.0, 1000.0)
    known = DeviceScale(torch.tensor(8.0), 1.0)
    known.number.known = 16.0
    assert f"{known:g}" == "16"


def test_what_is_known_of_a_scale_holds_no_tensor() -> None:
    scale = on_device(8.0)
    number, value = number_of(scale), weakref.ref(scale.value)
    assert (f"{number:g}", f"{number_of(4.0):g}") == ("unknown", "4")
    float(scale)
    del scale
    assert (f"{number:g}", value()) == ("8", None)
