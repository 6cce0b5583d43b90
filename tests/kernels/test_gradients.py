"""One read of gradients, beside torch's separate functions."""

from __future__ import annotations

import math

import autoamp_kernels
import pytest
import torch
from torch import Tensor

SIZES = (1, 0, 17, 33000, 70001)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_scaled_and_measured(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    ins = tensors(dtype)
    before = [tensor.clone() for tensor in ins]
    outs = [torch.empty_like(tensor, dtype=out_dtype) for tensor in ins] if out_dtype else None
    norms, total, found = torch.empty(len(ins)), torch.empty(()), torch.zeros(1)
    autoamp_kernels.scale_(
        ins, outs, inv_scale=0.75, grad_scale=torch.tensor(4.0), norms=norms, total=total, found_inf=found
    )
    wanted = [tensor.float() * (0.75 / 4) for tensor in before]
    for out, value in zip(outs or [], wanted, strict=bool(outs)):
        assert torch.equal(out, value.to(out_dtype))
    exact = torch.stack([value.double().norm() for value in wanted])
    torch.testing.assert_close(norms, exact.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(total, exact.norm().float(), rtol=1e-6, atol=0)
    assert found == 0
    assert all(map(torch.equal, ins, before))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype: torch.dtype) -> None:
    ins, before = tensors(dtype), tensors(dtype)
    version = ins[0]._version
    autoamp_kernels.scale_(ins, ins, grad_factor=torch.tensor(0.5))
    assert all(torch.equal(one, other * 0.5) for one, other in zip(ins, before, strict=True))
    assert ins[0]._version > version


@pytest.mark.parametrize("dtype", DTYPES)
def test_inf_and_nan_are_found(variant: str, dtype: torch.dtype) -> None:
    ins = tensors(dtype)
    for tensor, place in ((0, 0), (2, 16), (3, 32999), (4, 32768), (4, 70000)):
        for value in (math.inf, -math.inf, math.nan):
            found, before = torch.zeros(()), ins[tensor][place].clone()
            ins[tensor][place] = value
            autoamp_kernels.scale_(ins, found_inf=found, inv_scale=0.5)
            assert found == 1, (tensor, place, value)
            ins[tensor][place] = before


def test_an_overflow_by_the_factor_is_found_and_an_old_one_stays() -> None:
    found = torch.zeros(())
    autoamp_kernels.scale_([torch.full((3,), 1e30)], found_inf=found, inv_scale=1e20)
    assert found == 1
    autoamp_kernels.scale_([torch.ones(3)], found_inf=found)
    assert found == 1


def test_norms_do_not_depend_on_threads() -> None:
    ins, before, results = tensors(torch.bfloat16), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            norms, total = torch.empty(len(ins)), torch.empty(())
            autoamp_kernels.scale_(ins, norms=norms, total=total)
            results.append((norms, total))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(norms, results[0][0]) and total == results[0][1] for norms, total in results)


def test_refusals() -> None:
    ins = [torch.ones(4), torch.ones(5)]
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"norms has .*shape \(3,\).*must be .*\(2,\)"):
        autoamp_kernels.scale_(ins, norms=torch.empty(3))
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"share memory"):
        autoamp_kernels.scale_(ins, [ins[0], torch.ones(5)], inv_scale=2.0)
    assert bool((ins[0] == 1).all())


def test_no_tensors() -> None:
    total = torch.ones(())
    autoamp_kernels.scale_([], total=total)
    assert total == 0


@pytest.mark.parametrize("inplace", [False, True])
def test_compile_goes_around_it(inplace: bool) -> None:
    def scaled(ins: list[Tensor], outs: list[Tensor]) -> Tensor:
        found = torch.zeros(())
        autoamp_kernels.scale_(ins, ins if inplace else outs, inv_scale=0.5, found_inf=found)
        return found + 1

    ins, outs = [torch.ones(3)], [torch.zeros(3)]
    assert torch.compile(scaled, fullgraph=True, backend="eager")(ins, outs) == 1
    assert torch.equal((ins if inplace else outs)[0], torch.full((3,), 0.5))
