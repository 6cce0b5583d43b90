"""Every combination of dtypes, beside fp32 tensors of the same values: bitwise, by each variant of the CPU build."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import autoamp_kernels
import pytest
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 3, 16, 37, 2053, 40001)
BETAS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6}

# Parameters, and half copies of them.
STEPPED = [
    (torch.float32, None),
    *((torch.float32, half) for half in DTYPES[1:]),
    *((half, None) for half in DTYPES[1:]),
]


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def wide(values: list[Tensor]) -> list[Tensor]:
    return [value.to(torch.float32, copy=True) for value in values]


def ones(count: int) -> list[list[Tensor]]:
    return [[torch.ones(size) for size in SIZES] for _ in range(count)]


def adam(params: list[Tensor], grads: list[Tensor], **options: Any) -> list[list[Tensor]]:
    states = ones(2)
    autoamp_kernels.adam_(params, grads, *states, **BETAS, lr=0.1, step=2, **options)
    return states


def sgd(params: list[Tensor], grads: list[Tensor], **options: Any) -> list[list[Tensor]]:
    states = ones(1)
    autoamp_kernels.sgd_(params, grads, *states, lr=0.1, momentum=0.9, **options)
    return states


def adagrad(params: list[Tensor], grads: list[Tensor], **options: Any) -> list[list[Tensor]]:
    states = ones(1)
    autoamp_kernels.adagrad_(params, grads, *states, lr=0.1, eps=1e-6, **options)
    return states


def lamb(params: list[Tensor], grads: list[Tensor], **options: Any) -> list[list[Tensor]]:
    states = ones(2)
    autoamp_kernels.lamb_(params, grads, *states, **BETAS, lr=0.1, weight_decay=0.1, step=2, **options)
    return states


def novograd(params: list[Tensor], grads: list[Tensor], **options: Any) -> list[list[Tensor]]:
    states = ones(1)
    norms = [torch.ones(()) for _ in SIZES]
    autoamp_kernels.novograd_(params, grads, *states, norms, **BETAS, lr=0.1, step=2, **options)
    return [*states, norms]


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    """Nothing but the bits counts, and a wanted value is rounded to the dtype of what was got."""
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other.to(one.dtype))


@pytest.mark.parametrize("step", [adam, sgd, adagrad, lamb, novograd])
def test_a_step_is_that_of_fp32(variant: str, step: Callable[..., list[list[Tensor]]]) -> None:
    for grad_dtype, (dtype, half_dtype) in itertools.product(DTYPES, STEPPED):
        params, grads = tensors(0, dtype), tensors(1, grad_dtype)
        wanted = wide(params)
        halves = [torch.empty_like(param, dtype=half_dtype) for param in params] if half_dtype else None
        states = step(params, grads, halves=halves)
        for got, state in zip(states, step(wanted, wide(grads)), strict=True):
            assert_same(got, state)
        assert_same(params, wanted)
        assert_same(halves or params, wanted)


@pytest.mark.parametrize("max_norms", [False, True])
def test_scaling_is_that_of_fp32(variant: str, max_norms: bool) -> None:
    for dtype, out_dtype in itertools.product(DTYPES, (None, *DTYPES)):
        ins = tensors(0, dtype)
        outs = [torch.empty_like(one, dtype=out_dtype) for one in ins] if out_dtype else None
        norms, wide_norms = torch.empty(len(ins)), torch.empty(len(ins))
        autoamp_kernels.scale_(ins, outs, inv_scale=0.3, norms=norms, max_norms=max_norms)
        wanted = wide(ins)
        autoamp_kernels.scale_(wanted, wanted, inv_scale=0.3, norms=wide_norms, max_norms=max_norms)
        assert torch.equal(norms, wide_norms)
        assert_same(outs or [], wanted if outs else [])


def test_sums_are_those_of_fp32(variant: str) -> None:
    for x_dtype, y_dtype, out_dtype in itertools.product(DTYPES, repeat=3):
        xs, ys = tensors(0, x_dtype), tensors(1, y_dtype)
        outs, wanted = ([torch.empty(size, dtype=dtype) for size in SIZES] for dtype in (out_dtype, torch.float32))
        autoamp_kernels.axpby_(0.3, xs, 0.7, ys, outs)
        autoamp_kernels.axpby_(0.3, wide(xs), 0.7, wide(ys), wanted)
        assert_same(outs, wanted)
