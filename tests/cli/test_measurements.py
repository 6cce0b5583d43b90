"""How fast half precision is: rounds in pairs, of true dtypes, and the verdict on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.cli.measurements import REPEATS, measure, verdict

EVEN = [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("matmul", "elementwise", "said"),
    [
        ([8.0], [1.9], "fp16 pays here: matmul 8.0 times"),
        ([1.0], [1.9], "fp16 pays here for memory-bound models only"),
        ([1.0], [1.0], "fp16 does not pay here: matmul 1.0 times, memory-bound ops 1.0 times"),
        ([0.3], [1.9], "fp16 does not pay here: matmul 0.3 times"),
        ([0.0148], [1.9], "fp16 does not pay here: matmul 0.015 times"),
        ([1.5, 0.8, 1.9], EVEN, "fp16: too noisy to tell: matmul 0.8 to 1.9, memory-bound ops"),
        (EVEN, [1.5, 0.9, 1.8], "fp16: too noisy to tell"),
        # As noisy, but each repeat says the same.
        ([3.0, 2.0, 5.0], EVEN, "fp16 pays here: matmul 3.0 times"),
        ([0.2, 0.1, 0.4], EVEN, "fp16 does not pay here: matmul 0.2 times"),
        # Both sides of a limit, close together.
        ([1.2, 1.15, 1.25], EVEN, "fp16 pays here: matmul 1.2 times"),
    ],
)  # fmt: skip
def test_verdict_says_whether_half_precision_pays_or_that_repeats_differ(
    matmul: list[float], elementwise: list[float], said: str
) -> None:
    assert verdict("fp16", matmul, elementwise).startswith(said)


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
    assert [*found] == ["fp16", "bf16"]
    for matmul, elementwise in found.values():
        assert (len(matmul), len(elementwise)) == (REPEATS, REPEATS)
        assert min(*matmul, *elementwise) > 0
