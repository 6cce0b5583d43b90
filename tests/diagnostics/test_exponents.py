"""Histograms of exponents, beside a recomputation in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from autoamp.diagnostics import Exponents


def exponents_of(*tensors: Tensor) -> Exponents:
    found = Exponents()
    found.add(*tensors)
    return found


def values(seed: int, count: int = 20_000) -> np.ndarray:
    """Return fp32 values of all magnitudes, none of which only rounding takes over a limit."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-126, 127, count)
    return (np.ldexp(rng.uniform(1.01, 1.9, count), exponents) * rng.choice([-1, 1], count)).astype(np.float32)


@pytest.mark.parametrize("seed", [0, 1])
def test_histogram_is_that_of_numpy(seed: int) -> None:
    x = values(seed)
    found = exponents_of(torch.from_numpy(x).reshape(100, -1).t())
    expected = np.unique(np.frexp(x)[1] - 1, return_counts=True)
    assert found.to_dict()["exponents"] == {str(e): n for e, n in zip(*map(np.ndarray.tolist, expected), strict=True)}
    assert found.elements == len(x)
    assert found.largest == int(expected[0][-1])


@pytest.mark.parametrize("scale", [0, 8, 16])
def test_what_fp16_cannot_hold_is_what_numpy_rounds(scale: int) -> None:
    x = values(3)
    with np.errstate(over="ignore", under="ignore"):
        half = (x.astype(np.float64) * 2.0**scale).astype(np.float16)
    assert exponents_of(torch.from_numpy(x)).in_format("float16", scale) == {
        "underflow": int((half == 0).sum()),
        "subnormal": int(((half != 0) & (np.abs(half) < 2.0**-14)).sum()),
        "overflow": int(np.isinf(half).sum()),
    }


@pytest.mark.parametrize("scale", [0, 10])
def test_what_rounding_takes_to_inf_in_fp16_overflows(scale: int) -> None:
    edge = np.array([65519.996, 65520.0, -65535.99, 65504.0, 65536.0, 1.9999], dtype=np.float32) / 2**scale
    found = exponents_of(torch.from_numpy(edge))
    with np.errstate(over="ignore"):
        expected = int(np.isinf((edge.astype(np.float64) * 2.0**scale).astype(np.float16)).sum())
    assert found.in_format("float16", scale)["overflow"] == expected == 3
    # What rounds up to 65536 is counted there, whatever the scale; so is 1.9999 at 2.
    assert found.to_dict()["exponents"] == {str(16 - scale): 3, str(15 - scale): 2, str(1 - scale): 1}


def test_counts_of_bf16_are_those_of_a_cast() -> None:
    x = torch.from_numpy(values(4))
    found, brain = exponents_of(x), x.bfloat16()
    assert not brain.isinf().any()
    assert found.in_format("bfloat16") == {"underflow": int((brain == 0).sum()), "subnormal": 0, "overflow": 0}
    # At a loss scale of 4 the values of the two largest exponents overflow.
    assert found.in_format("bfloat16", 2)["overflow"] == int((x * 4).isinf().sum()) > 0


def test_zeros_nonfinite_and_other_dtypes() -> None:
    found = exponents_of(
        torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.0]),
        torch.tensor([1.5], dtype=torch.float64), torch.tensor(0.25, dtype=torch.bfloat16),
    )  # fmt: skip
    assert (found.zeros, found.nonfinite, found.elements) == (2, 3, 9)
    assert found.to_dict()["exponents"] == {"-127": 1, "-2": 1, "0": 1, "1": 1}
    # The largest finite value, of which masks are made, stays finite.
    top = exponents_of(torch.full((2,), torch.finfo(torch.float32).min))
    assert (top.largest, top.nonfinite, Exponents().largest) == (127, 0, None)
    assert top.to_dict()["bfloat16"]["overflow"] == 0
