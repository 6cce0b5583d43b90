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


def test_found_is_what_torch_finds_and_an_old_one_stays() -> None:
    """An overflow by the factor, or by rounding, is none of the gradients'."""
    for value, factor in ((1e30, 1e20), (60000.0, 2.0), (math.inf, 0.0), (1.0, math.inf)):
        found, wanted = torch.zeros(1), torch.zeros(1)
        ins, same = [torch.full((3,), value)], [torch.full((3,), value)]
        torch._amp_foreach_non_finite_check_and_unscale_(same, wanted, torch.tensor(factor))
        autoamp_kernels.scale_(ins, [torch.empty(3, dtype=torch.float16)], found_inf=found, inv_scale=factor)
        assert found == wanted
    found = torch.ones(())
    autoamp_kernels.scale_([torch.ones(3)], found_inf=found)
    assert found == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_norms(variant: str, dtype: torch.dtype) -> None:
    ins = tensors(dtype)
    ins[4][-1] = -50.0
    norms, total = torch.empty(len(ins)), torch.empty(())
    autoamp_kernels.scale_(ins, inv_scale=0.5, norms=norms, total=total, max_norms=True)
    assert norms.tolist() == [float(one.float().abs().max()) / 2 if one.numel() else 0.0 for one in ins]
    assert total == 25.0
    ins[2][3] = math.nan
    autoamp_kernels.scale_(ins, norms=norms, total=total, max_norms=True)
    assert norms.isnan().tolist() == [False, False, True, False, False]
    assert total.isnan()


@pytest.mark.parametrize("out_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)], ids=str)
def test_sums(variant: str, dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype | None) -> None:
    xs, ys = tensors(dtypes[0]), tensors(dtypes[1], seed=1)
    outs = [torch.empty_like(y, dtype=out_dtype) for y in ys] if out_dtype else None
    wanted = [(0.5 * x.double() + 3 * y.double()).to(out_dtype or dtypes[1]) for x, y in zip(xs, ys, strict=True)]
    before, found = [y.clone() for y in ys], torch.zeros(())
    autoamp_kernels.axpby_(1.0, xs, 3.0, ys, outs, grad_scale=torch.tensor(2.0), found_inf=found)
    for out, value in zip(outs or ys, wanted, strict=True):
        torch.testing.assert_close(out, value)
    assert found == 0
    assert outs is None or all(map(torch.equal, ys, before))


@pytest.mark.parametrize("where", ["xs", "ys"])
def test_sums_are_checked_where_wanted(where: str) -> None:
    for checked in ("xs", "ys"):
        lists = {"xs": tensors(torch.float16), "ys": tensors(torch.float32)}
        lists[where][4][70000] = math.nan
        found = torch.zeros(())
        others = {f"check_{name}": name == checked for name in lists}
        autoamp_kernels.axpby_(1.0, lists["xs"], 1.0, lists["ys"], found_inf=found, **others)
        assert bool(found) == (where == checked)


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
