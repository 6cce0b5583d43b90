"""Dtypes are the same in eager mode and in compiled code: those that are promised, and those of the lists."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from tests.null_cuda.training import open_libraries

pytestmark = pytest.mark.null_cuda


class Ops(nn.Module):
    """Products, a loss and a norm."""

    def forward(self, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.matmul(t, w), t @ w, t.mm(w), F.linear(t, w), F.cross_entropy(t @ w, w), F.normalize(t @ w)


class Net(nn.Module):
    """The ops in a module, in a disabled region, and by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Ops(), Ops()

    def forward(self, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", enabled=False):
            region = self.outer(t, w)
        return *self.inner(t, w), *region, *self.outer(t, w)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_dtypes_are_the_same_on_every_path(half: torch.dtype) -> None:
    open_libraries()
    model, t, w = Net(), torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda")
    handle = autoamp.init(device_type="cuda", dtype=half)
    try:
        handle.override(model.inner, "fp32")
        expected = [output.dtype for output in model(t, w)]
        assert expected[:16] == [torch.float32] * 12 + [half] * 4
        for backend in ("eager", "aot_eager"):
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            assert [output.dtype for output in compiled(t, w)] == expected, backend
    finally:
        handle.deactivate()
        torch._dynamo.reset()
