"""Nobody who looks on changes a result: weights, buffers and random numbers are bitwise the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoamp.tools import Observer


class Computes(Observer):
    """Calls listed functions itself."""

    def before(self, call: Any) -> None:
        F.linear(torch.ones(1, 1), torch.ones(1, 1))


def trained(handle: Any, around: contextlib.AbstractContextManager[object]) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 2)
    )
    optimizer = torch.optim.Adam(model.parameters())
    with around:
        for _ in range(3):
            loss = F.mse_loss(model(torch.randn(5, 4)).float(), torch.randn(5, 2))
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*(p.detach() for p in model.parameters()), *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize(
    "start",
    [lambda h: h.observe(Computes()), lambda h: h.count(), lambda h: h.trace(), lambda h: h.record()],
    ids=["observe", "count", "trace", "record"],
)
def test_training_is_bitwise_the_same(handle: Any, start: Callable[[Any], Any]) -> None:
    assert all(map(torch.equal, trained(handle, contextlib.nullcontext()), trained(handle, start(handle))))


def test_a_range_profile_is_bitwise_fp32(handle: Any) -> None:
    assert all(map(torch.equal, trained(handle, handle.disable_casts()), trained(handle, handle.profile_ranges())))
    assert F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float16
