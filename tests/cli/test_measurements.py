"""How fast half precision is: rounds in pairs, of true dtypes, and the verdict on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.cli.measurements import Measured, Spread, measure


@pytest.mark.parametrize(
    ("matmul", "elementwise", "said"),
    [
        (8.0, 1.9, "fp16 pays here: matmul 8.0 times"),
        (1.0, 1.9, "memory-bound models only"),
        (1.0, 1.0, "saves memory, not time"),
        (0.3, 1.9, "does not pay here: matmul 0.3 times"),
        (0.0148, 1.9, "does not pay here: matmul 0.015 times"),
    ],
)
def test_verdict_says_whether_half_precision_pays(matmul: float, elementwise: float, said: str) -> None:
    spreads = (Spread(ratio, ratio, ratio) for ratio in (matmul, elementwise))
    assert said in Measured("fp16", *spreads).verdict


@pytest.mark.parametrize(
    ("matmul", "elementwise", "said"),
    [
        (Spread(1.5, 0.8, 1.9), Spread(1.0, 1.0, 1.0), "fp16: too noisy to tell: matmul 0.8 to 1.9, memory-bound ops"),
        (Spread(1.0, 1.0, 1.0), Spread(1.5, 0.9, 1.8), "fp16: too noisy to tell"),
        # As noisy, but each repeat says the same.
        (Spread(3.0, 2.0, 5.0), Spread(1.0, 1.0, 1.0), "fp16 pays here: matmul 3.0 times"),
        (Spread(0.2, 0.1, 0.4), Spread(1.0, 1.0, 1.0), "fp16 does not pay here: matmul 0.2 times"),
        # Both sides of a limit, close together.
        (Spread(1.2, 1.15, 1.25), Spread(1.0, 1.0, 1.0), "fp16 pays here: matmul 1.2 times"),
    ],
)
def test_verdict_says_where_repeats_differ(matmul: Spread, elementwise: Spread, said: str) -> None:
    assert Measured("fp16", matmul, elementwise).verdict.startswith(said)


class Products(TorchDispatchMode):
    """Notes the dtypes that matrices are multiplied in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_measurement_is_of_true_dtypes_under_an_active_handle() -> None:
    autoamp.init(device_type="cpu", dtype=torch.float16)
    with Products() as products:
        found = measure("cpu", seconds=0.0)
    assert products.dtypes == {torch.float32, torch.float16, torch.bfloat16}
    assert [one.dtype for one in found] == ["fp16", "bf16"]
    assert all(0 < one.matmul.low <= one.matmul.high and one.elementwise.low > 0 for one in found)


def test_spread_is_median_lowest_and_highest() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 1.0, 5.0)
