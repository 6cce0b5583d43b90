"""Functions that run under torch's autocast for the one call: where they do, and that no trace is left."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import autoamp
from autoamp.core import CastState
from autoamp.core.special_calls import COMPOSITES, build_composite

HALVES = torch.float16, torch.bfloat16


def test_composites_run_under_autocast_where_an_argument_is_half(half: torch.dtype) -> None:
    casts = CastState(half, "cpu")
    casts.enable()
    seen: list[tuple[bool, bool, torch.dtype]] = []
    other = HALVES[HALVES[0] is half]
    torch.set_autocast_dtype("cpu", other)

    def within(*args: Any, **kwargs: Any) -> Any:
        seen.append(
            (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), torch.get_autocast_dtype("cpu"))
        )
        return F.cross_entropy(*args, **kwargs)

    run = build_composite(within, casts)
    x, labels = torch.randn(4, 8).to(half), torch.arange(4)
    loss = run((x, labels), {"reduction": "sum"})
    assert (loss.dtype, seen) == (torch.float32, [(True, False, half)])
    assert torch.equal(loss, F.cross_entropy(x.float(), labels, reduction="sum"))
    assert run((x.float(), labels), {}) is NotImplemented
    with pytest.raises((IndexError, ValueError)):
        run((x, torch.arange(5)), {})
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert torch.get_autocast_dtype("cpu") is other
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    for args in ((x, labels, x, None, 0, x), (x.to_sparse(), labels), (object(),)):
        assert run(args, {"out": x} if len(args) > 2 else {}) is NotImplemented
    for around in (torch.autocast("cpu", half), TorchFunctionMode()):
        with around:
            assert run((x, labels), {}) is NotImplemented
    found = []
    with warnings.catch_warnings(action="ignore"):
        torch.jit.trace(lambda x: (x * 1, found.append(run((x, labels), {})))[0], x)
    assert found[0] is NotImplemented


def test_cuda_alone_has_composites(half: torch.dtype) -> None:
    assert {F.cross_entropy, torch.trapezoid, torch.Tensor.trace} <= COMPOSITES
    autoamp.init(device_type="cpu", dtype=half, lists="default")
    assert torch.ones(4, 4).to(half).sum_to_size(4).dtype is torch.float32
