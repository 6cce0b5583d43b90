"""LAMB and NovoGrad beside `autoamp.optimizers`, in fp32 by torch's multi-tensor functions."""

from __future__ import annotations

import math
from typing import Any

import autoamp_kernels
import pytest
import torch
from torch import Tensor

from autoamp import kernels
from autoamp.optimizers import FusedLAMB, FusedNovoGrad

SIZES = (1, 3, 0, 33, 32768, 70001)
BETAS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6}


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def zeros() -> list[Tensor]:
    return [torch.zeros(size) for size in SIZES]


def assert_near(got: list[Tensor], wanted: list[Tensor]) -> None:
    """A step is up to 1e-2; where gradient and decay cancel, their rounding is a larger part of it."""
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=2e-5, atol=1e-5)


def reference(kind: Any, **options: Any) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    models = [value.requires_grad_() for value in tensors()]
    betas = BETAS["beta1"], BETAS["beta2"]
    return kind(models, lr=BETAS["lr"], betas=betas, eps=BETAS["eps"], **options), models


def step_both(optimizer: torch.optim.Optimizer, models: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Take a step of the reference; return the gradients times 4."""
    for model, grad in zip(models, grads, strict=True):
        model.grad = grad.float()
    optimizer.step()
    return [grad * 4 for grad in grads]


@pytest.fixture(autouse=True)
def torchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references are autoamp's optimizers, which would step by these very kernels."""
    monkeypatch.setattr(kernels, "opened", lambda _: None)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled": False, "grad_averaging": False},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "always_adapt": True, "bias_correction": False, "max_norm": 1e6},
], ids=str)  # fmt: skip
def test_lamb_is_that_of_autoamp(variant: str, grad_dtype: torch.dtype, options: dict[str, Any]) -> None:
    names = {"decoupled": "adam_w_mode", "always_adapt": "use_nvlamb", "max_norm": "max_grad_norm"}
    options = {"max_norm": 1.0, **options}
    optimizer, models = reference(FusedLAMB, **{names.get(name, name): value for name, value in options.items()})
    params, firsts, seconds = tensors(), zeros(), zeros()
    halves, total = [value.half() for value in params], torch.zeros(())
    for step in range(1, 4):
        grads = step_both(optimizer, models, tensors(step, grad_dtype))
        autoamp_kernels.scale_(grads, inv_scale=0.25, total=total)
        autoamp_kernels.lamb_(
            params, grads, firsts, seconds, **BETAS, **options, step=step, halves=halves, inv_scale=0.25,
            global_norm=total,
        )  # fmt: skip
    assert_near(params, models)
    assert_near(firsts, [optimizer.state[model]["exp_avg"] for model in models])
    assert_near(seconds, [optimizer.state[model]["exp_avg_sq"] for model in models])
    assert all(torch.equal(half, param.half()) for half, param in zip(halves, params, strict=True))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [
    {"weight_decay": 0.1, "inside": True},
    {"weight_decay": 0.1, "bias_correction": True, "grad_averaging": True},
    {"max_norms": True, "bias_correction": True},
], ids=str)  # fmt: skip
def test_novograd_is_that_of_autoamp(variant: str, grad_dtype: torch.dtype, options: dict[str, Any]) -> None:
    given = {"bias_correction": False, "grad_averaging": False, **options}
    norm_type = 0 if given.pop("max_norms", False) else 2
    optimizer, models = reference(
        FusedNovoGrad, reg_inside_moment=given.pop("inside", False), norm_type=norm_type, **given
    )
    params, firsts, norms = tensors(), zeros(), [torch.full((), 7.0) for _ in SIZES]
    halves = [value.bfloat16() for value in params]
    for step in range(1, 4):
        grads = step_both(optimizer, models, tensors(step, grad_dtype))
        autoamp_kernels.novograd_(
            params, grads, firsts, norms, **BETAS, **options, step=step, first=step == 1, halves=halves,
            grad_scale=torch.tensor(4.0),
        )  # fmt: skip
    assert_near(params, models)
    assert_near(firsts, [optimizer.state[model]["exp_avg"] for model in models])
    assert_near(norms, [optimizer.state[model]["exp_avg_sq"] for model in models])
    assert all(torch.equal(half, param.bfloat16()) for half, param in zip(halves, params, strict=True))


def test_lamb_of_zeros_has_a_trust_ratio_of_one() -> None:
    params, grads, firsts, seconds = ([torch.zeros(5), torch.ones(5)] for _ in range(4))
    grads[0].fill_(1.0)
    grads[1].zero_(), firsts[1].zero_()
    autoamp_kernels.lamb_(params, grads, firsts, seconds, **BETAS, step=1, always_adapt=True)
    torch.testing.assert_close(params[0], torch.full((5,), -0.01))
    assert torch.equal(params[1], torch.ones(5))


def both(found_inf: Tensor | None) -> list[Tensor]:
    """Step by both kernels with counts on the device; return all that they write."""
    written: list[Tensor] = []
    for kernel in (autoamp_kernels.lamb_, autoamp_kernels.novograd_):
        params, grads, firsts, halves = tensors(), tensors(1), zeros(), [value.half() for value in tensors()]
        step, rest = torch.zeros((), dtype=torch.int32), [torch.ones(size) for size in SIZES]
        if kernel is autoamp_kernels.novograd_:
            rest = [torch.ones(()) for _ in SIZES]
        options = {**BETAS, "lr": torch.tensor(0.01), "bias_correction": True, "weight_decay": 0.1}
        kernel(params, grads, firsts, rest, **options, step=step, advance=True, halves=halves, found_inf=found_inf)
        written += [*params, *firsts, *rest, *halves, step]
    return written


def test_an_overflow_skips_all_of_it() -> None:
    skipped, stepped = both(torch.ones(1)), both(torch.zeros(1))
    assert {int(one) for one in skipped if one.dtype is torch.int32} == {0}
    assert {int(one) for one in stepped if one.dtype is torch.int32} == {1}
    for index, value in enumerate(tensors()):
        assert torch.equal(skipped[index], value)
        assert value.numel() == 0 or not torch.equal(stepped[index], value)


def test_threads_and_variants_give_the_same_bits(variant: str) -> None:
    from autoamp_kernels.library import library

    before, results = torch.get_num_threads(), [both(None)]
    try:
        torch.set_num_threads(3)
        results.append(both(None))
        library().use_cpu_variant("plain")
        results.append(both(None))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


def test_refusals_name_the_list() -> None:
    params, grads, firsts = ([torch.ones(4)] for _ in range(3))
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"norms\[0\] has 4 elements; it must have 1"):
        autoamp_kernels.novograd_(params, grads, firsts, [torch.ones(4)], **BETAS)
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"global_norm has dtype torch.float64"):
        autoamp_kernels.lamb_(
            params, grads, firsts, [torch.ones(4)], **BETAS, step=1, global_norm=torch.ones((), dtype=torch.float64)
        )
    assert bool((params[0] == 1).all())


def test_nan_stays_in_its_tensor() -> None:
    params, grads, firsts, seconds = ([torch.ones(5), torch.ones(6)] for _ in range(4))
    grads[0][2] = math.nan
    autoamp_kernels.lamb_(params, grads, firsts, seconds, **BETAS, step=1, always_adapt=True)
    assert params[0].isnan().all()
    assert params[1].isfinite().all()


@pytest.mark.parametrize("name", ["lamb_", "novograd_"])
def test_compile_goes_around_it(name: str) -> None:
    def stepped(params: list[Tensor], grads: list[Tensor], firsts: list[Tensor], rest: list[Tensor]) -> Tensor:
        getattr(autoamp_kernels, name)(params, grads, firsts, rest, **BETAS, step=1)
        return params[0] + 1

    made = [[torch.ones(3)] for _ in range(3)] + [[torch.ones(3 if name == "lamb_" else ())]]
    result = torch.compile(stepped, fullgraph=True, backend="eager")(*made)
    assert torch.equal(result, made[0][0] + 1)
    assert not torch.equal(made[0][0], torch.ones(3))
