"""The backward of an RMS norm beside its formula in fp64."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import Tensor

with contextlib.suppress(ImportError):
    import autoamp_kernels

pytestmark = pytest.mark.client("autoamp_kernels")

HALF = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = ((1, 1), (3, 5), (40, 64), (700, 33), (5, 2049), (2, 5000))


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2 + 0.5).to(dtype)


def near(got: Tensor | None, wanted: Tensor, tolerance: float) -> None:
    """An error may be that of the largest values: sums lose digits where they cancel."""
    assert got is not None
    largest = float(wanted.abs().max())
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * max(1.0, largest))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("grad_dtype", [torch.float32, *HALF])
def test_it_is_the_formula(grad_dtype: torch.dtype, dtype: torch.dtype, weighted: bool) -> None:
    for rows, columns in SHAPES:
        x, grad = values(rows, columns, dtype=dtype), values(rows, columns, dtype=grad_dtype, seed=1)
        weight = values(columns, seed=2) if weighted else None
        rstd = 1 / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
        g, normal = grad.double() * (1.0 if weight is None else weight.double()), x.double() * rstd
        got = autoamp_kernels.rms_norm_backward(grad, x, rstd.float(), weight)
        assert got[0] is not None
        assert got[0].dtype is dtype
        near(got[0], rstd * (g - normal * (g * normal).mean(1, keepdim=True)), TOLERANCE[dtype])
        near(got[1], (grad.double() * normal).sum(0), 2e-5)


def test_threads_change_no_bit_and_only_what_is_wanted_is_made() -> None:
    x, grad, weight = values(900, 70, dtype=HALF[1]), values(900, 70, seed=1), values(70, seed=2)
    rstd, before = torch.rsqrt(x.float().square().mean(1)), torch.get_num_threads()
    whole = autoamp_kernels.rms_norm_backward(grad, x, rstd, weight)
    torch.set_num_threads(3)
    try:
        for wanted in itertools.product((True, False), repeat=2):
            got = autoamp_kernels.rms_norm_backward(grad, x, rstd, weight, wanted=wanted)  # type: ignore[arg-type]
            for is_wanted, one, other in zip(wanted, got, whole, strict=True):
                assert (one is not None and torch.equal(one, other)) if is_wanted else one is None  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)


def test_nothing_and_nan() -> None:
    none = torch.empty(0, 4, dtype=HALF[0])
    got = autoamp_kernels.rms_norm_backward(none, none, torch.empty(0), torch.ones(4))
    assert [one.tolist() for one in got if one is not None] == [[], [0.0] * 4]
    x, grad = values(4, 50, dtype=HALF[1]), values(4, 50, seed=1)
    x[2, 7] = float("nan")
    of_input, of_weight = autoamp_kernels.rms_norm_backward(grad, x, torch.ones(4))
    assert of_input is not None
    assert of_weight is not None
    assert of_input.isnan().any(1).tolist() == [False, False, True, False]
    assert of_weight.isnan().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize(("name", "bad", "match"), [
    ("x", torch.ones(3, 4), "input has dtype torch.float32"),
    ("x", torch.ones(4, 3, dtype=HALF[0]).t(), "input is not contiguous"),
    ("grad", torch.ones(2, 4), "grad has 8 elements; it must have 12"),
    ("rstd", torch.ones(5), "rstd has 5 elements and input 12"),
    ("weight", torch.ones(4, device="meta"), "weight is on meta"),
])  # fmt: skip
def test_refusals_name_the_tensor(name: str, bad: Tensor, match: str) -> None:
    given = {"grad": torch.ones(3, 4), "x": torch.ones(3, 4, dtype=HALF[0]), "rstd": torch.ones(3),
             "weight": torch.ones(4), name: bad}  # fmt: skip
    with pytest.raises(autoamp_kernels.ArgumentError, match=match):
        autoamp_kernels.rms_norm_backward(*given.values())
