"""Batch norm over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoamp import parallel
from tests.integration.spawned import on_ranks

SHAPES = {"images": (8, 3, 5, 6), "rows": (8, 70), "one": (8, 3, 1)}
# Squares of such values have no room for the digits of their variance.
FAR = 1e6
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def given_to(name: str, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(3)) * 2 + 5).to(dtype)


def norm_of(channels: int) -> Any:
    norm = parallel.SyncBatchNorm(channels)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, channels))
        norm.bias.copy_(torch.linspace(-1.0, 1.0, channels))
    return norm


def normed() -> dict[str, Any]:
    """Train and differentiate twice, in uneven parts."""
    rank, found = dist.get_rank(), dict[str, Any]()
    for name in SHAPES:
        for dtype in DTYPES:
            for last in (False, True) if name == "images" else (False,):
                norm = norm_of(SHAPES[name][1])
                part = given_to(name, dtype).split([3, 5])[rank].clone()
                part = part.to(memory_format=torch.channels_last) if last else part
                output = norm(part.requires_grad_())
                (output.float().cos()).sum().backward()
                found[f"{name} {dtype} {last}"] = [
                    output.detach(), part.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var,
                ]  # fmt: skip
    norm, part = norm_of(3).double(), given_to("images", torch.float64).split([3, 5])[rank].clone().requires_grad_()
    (grad,) = torch.autograd.grad(norm(part).cos().sum(), part, create_graph=True)
    grad.square().sum().backward()
    found["twice"] = [part.grad]
    far = (given_to("rows", torch.float64) + FAR).split([3, 5])[rank]
    found["far"] = [parallel.SyncBatchNorm(70).double()(far).detach()]
    # All values are on one rank.
    whole = given_to("images", torch.float32)
    found["empty"] = [norm_of(3)(whole[: 8 * rank]).detach()]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes found."""
    return on_ranks(tmp_path_factory, 2, normed)


@pytest.mark.parametrize("name", SHAPES)
def test_both_ranks_together_are_one_batch(ranks: list[Any], name: str) -> None:
    plain = torch.nn.BatchNorm2d(SHAPES[name][1]) if name == "images" else torch.nn.BatchNorm1d(SHAPES[name][1])
    plain.load_state_dict(norm_of(SHAPES[name][1]).state_dict())
    given = given_to(name, torch.float32).requires_grad_()
    output = plain(given)
    output.cos().sum().backward()
    got = [found[f"{name} torch.float32 False"] for found in ranks]
    torch.testing.assert_close(torch.cat([one[0] for one in got]), output.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([one[1] for one in got]), given.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[0][2] + got[1][2], plain.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[0][3] + got[1][3], plain.bias.grad, rtol=1e-4, atol=1e-4)
    for one in got:
        torch.testing.assert_close(one[4], plain.running_mean)
        torch.testing.assert_close(one[5], plain.running_var)


def test_second_derivatives_are_those_of_the_whole_batch(ranks: list[Any]) -> None:
    plain = torch.nn.BatchNorm2d(3).double()
    plain.load_state_dict(norm_of(3).state_dict())
    given = given_to("images", torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(plain(given).cos().sum(), given, create_graph=True)
    grad.square().sum().backward()
    got = torch.cat([found["twice"][0] for found in ranks])
    torch.testing.assert_close(got, given.grad, rtol=1e-6, atol=1e-8)


def test_a_rank_without_values_takes_part(ranks: list[Any]) -> None:
    plain = torch.nn.BatchNorm2d(3)
    plain.load_state_dict(norm_of(3).state_dict())
    expected = plain(given_to("images", torch.float32)).detach()
    assert ranks[0]["empty"][0].shape == (0, 3, 5, 6)
    torch.testing.assert_close(ranks[1]["empty"][0], expected, rtol=1e-4, atol=1e-5)


def test_parts_far_from_zero_are_put_together_without_losing_digits(ranks: list[Any]) -> None:
    expected = torch.nn.BatchNorm1d(70).double()(given_to("rows", torch.float64) + FAR)
    torch.testing.assert_close(torch.cat([found["far"][0] for found in ranks]), expected.detach(), rtol=1e-7, atol=1e-7)
