"""docs/howto/custom_ops.md: functions that no list of autoamp names."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autoamp
from tests.behaviour.training import started

HALF, FP32 = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)


def dtypes_within(decorate: Callable[[Any], Any], *given: Tensor) -> list[torch.dtype]:
    """The dtypes in which a decorated function gets its arguments."""
    return decorate(lambda *args: [one.dtype for one in args])(*given)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("decorate", "dtypes"),
    [
        (autoamp.half_function, [torch.float16, torch.float16]),
        (autoamp.float_function, [torch.float32, torch.float32]),
        (autoamp.promote_function, [torch.float32, torch.float32]),
    ],
)
def test_a_decorator_says_in_which_dtype_arguments_arrive(decorate: Any, dtypes: list[torch.dtype]) -> None:
    started()
    assert dtypes_within(decorate, HALF, FP32) == dtypes


def test_nothing_is_cast_within_a_float_function_and_lists_hold_within_a_half_function() -> None:
    started()
    assert autoamp.float_function(lambda x: x @ x)(HALF).dtype == torch.float32
    assert autoamp.half_function(lambda x: x.softmax(-1))(FP32).dtype == torch.float32


def test_without_a_handle_a_decorator_does_nothing() -> None:
    assert dtypes_within(autoamp.float_function, HALF) == [torch.float16]


def test_a_registered_function_of_another_package_is_cast() -> None:
    library = types.SimpleNamespace(focal=lambda x: x.dtype)
    autoamp.register_float_function(library, "focal")
    started()
    assert library.focal(HALF) == torch.float32


def test_registering_a_name_that_is_not_there_is_an_error_with_the_nearest() -> None:
    library = types.SimpleNamespace(focal=len)
    with pytest.raises(autoamp.TargetError, match="did you mean 'focal'"):
        autoamp.register_float_function(library, "focl")


def test_an_autograd_function_gets_fp32_inputs_by_its_decorated_apply() -> None:
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0]  # type: ignore[no-any-return]

    started()
    x = torch.full((3,), 12.0, dtype=torch.float16, requires_grad=True)
    y = autoamp.float_function(Exponential.apply)(x)
    assert y.dtype == torch.float32
    assert y.isfinite().all()
