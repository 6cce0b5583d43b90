"""What a step holds for its time, of models that are large enough to be stepped in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import autoamp
from autoamp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.null_cuda.device import held, spent
from tests.null_cuda.training import open_libraries

pytestmark = pytest.mark.null_cuda

# Elements of a parameter, which are a part each; and what a part is in fp32.
SIZE = 2**24
PART = 4 * SIZE
COUNT = 6
# Norms, and what else is small.
SMALL = 2**20


@pytest.mark.parametrize(("make", "parts"), [
    (FusedAdam, 2), (lambda p: FusedSGD(p, lr=0.1, momentum=0.9), 0), (FusedAdagrad, 2), (FusedLAMB, 3),
    (FusedNovoGrad, 1), (lambda p: FusedAdam(p, capturable=True), 3),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_optimizers_hold_parts(make: Callable[[Any], Any], parts: int, dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.empty(SIZE, dtype=dtype, device="cuda")) for _ in range(COUNT)]
    for param in params:
        param.grad = torch.empty_like(param)
    optimizer = make(params)
    optimizer.step()
    # Of half parameters there are a gradient and the values in fp32 beside.
    most = parts * PART + (2 * PART if dtype is torch.float16 else 0) + SMALL
    before = held()
    assert spent(optimizer.step).peak - before <= most


@pytest.mark.parametrize("own", [True, False])
def test_both_kinds_of_gradients_at_o2_take_no_more_than_those_in_fp32(own: bool) -> None:
    open_libraries()
    layers = 16
    with torch.device("cuda"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
        x = torch.empty(1, 1024)
    optimizer: Any = torch.optim.AdamW(model.half().parameters() if own else model.parameters(), fused=True)
    if own:
        optimizer, x = autoamp.FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False), x.half()
    else:
        autoamp.initialize(model, optimizer, opt_level="O2", dtype=torch.float16, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).float().sum()
        if own:
            optimizer.backward(loss)
        else:
            with autoamp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()

    before = held()
    for _ in range(3):
        step()
    optimizer.zero_grad()
    # Two averages stay from step to step, beside weights and masters. When it steps there are gradients in fp32; of the
    # last one that is widened there are both.
    each = 2**20
    count = layers * each
    assert held() - before <= 8 * count + SMALL
    start = held()
    assert spent(step).peak - start <= 4 * count + 2 * each + SMALL
