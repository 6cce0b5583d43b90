"""Each kernel beside a naive reference: torch's own optimizers, or the formula in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import autoamp_kernels
import pytest
import torch
from autoamp_kernels.library import library
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

SIZES = (1, 3, 16, 0, 33, 1000, 32768, 70001)
HALF = (torch.bfloat16, torch.float16)


def tensors(sizes: Any = SIZES, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def zeros(like: list[Tensor]) -> list[Tensor]:
    return [torch.zeros(tensor.shape) for tensor in like]


def assert_near(got: list[Tensor], wanted: list[Tensor], *, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=rtol, atol=atol)


ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}


def torch_adam(values: list[Tensor], *, decoupled: bool, **options: Any) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(values, lr=ADAM["lr"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"], **options)


@pytest.mark.parametrize(
    ("grad_dtype", "half_dtype"),
    [(torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, HALF[0])],
)
@pytest.mark.parametrize("options", [
    {"decoupled": True, "weight_decay": 0.1},
    {"decoupled": False, "weight_decay": 0.1, "maximize": True},
    {"decoupled": True, "weight_decay": 0.0, "amsgrad": True},
], ids=str)  # fmt: skip
def test_adam_is_torchs(
    variant: str, grad_dtype: torch.dtype, half_dtype: torch.dtype | None, options: dict[str, Any]
) -> None:
    params = tensors()
    models = [param.clone().requires_grad_() for param in params]
    reference = torch_adam(models, **options)
    firsts, seconds = zeros(params), zeros(params)
    given = dict(options)
    largest = zeros(params) if given.pop("amsgrad", False) else None
    halves = [torch.empty_like(param, dtype=half_dtype) for param in params] if half_dtype else None
    for step in range(1, 4):
        grads = tensors(seed=step, dtype=grad_dtype)
        for model, grad in zip(models, grads, strict=True):
            model.grad = grad.float()
        reference.step()
        autoamp_kernels.adam_(
            params, [grad * 4 for grad in grads], firsts, seconds, **ADAM, **given, step=step, halves=halves,
            max_exp_avg_sqs=largest, inv_scale=0.25,
        )  # fmt: skip
    assert_near(params, models)
    assert_near(firsts, [reference.state[model]["exp_avg"] for model in models])
    assert_near(seconds, [reference.state[model]["exp_avg_sq"] for model in models])
    for half, param in zip(halves or [], params, strict=bool(halves)):
        assert torch.equal(half, param.to(half_dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_adam_of_half_parameters_computes_in_fp32(dtype: torch.dtype) -> None:
    params, grads = tensors(dtype=dtype), tensors(seed=1, dtype=dtype)
    wide, firsts, seconds = [param.float() for param in params], zeros(params), zeros(params)
    autoamp_kernels.adam_(params, grads, firsts, seconds, **ADAM, step=1)
    autoamp_kernels.adam_(wide, grads, zeros(params), zeros(params), **ADAM, step=1)
    assert_near(params, [value.to(dtype) for value in wide], rtol=0, atol=0)


def formula(param: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: int, **options: Any) -> Tensor:
    """Adam, algorithm 1, with the options that torch lacks."""
    first = 0.9 * first + 0.1 * grad
    second = 0.99 * second + 0.01 * grad * grad
    if options.get("bias_correction", True):
        first, second = first / (1 - 0.9**step), second / (1 - 0.99**step)
    eps = 1e-3
    root = (second + eps).sqrt() if options.get("eps_inside_sqrt") else second.sqrt() + eps
    return param - 1e-2 * first / root


@pytest.mark.parametrize("options", [{"bias_correction": False}, {"eps_inside_sqrt": True}], ids=str)
def test_adam_options_of_apex(options: dict[str, Any]) -> None:
    params, grads = tensors(), tensors(seed=1)
    before = [param.double() for param in params]
    autoamp_kernels.adam_(params, grads, zeros(params), zeros(params), **{**ADAM, "eps": 1e-3}, step=3, **options)
    nothing = torch.zeros((), dtype=torch.float64)
    wanted = [formula(param, grad.double(), nothing, nothing, 3, **options)
              for param, grad in zip(before, grads, strict=True)]  # fmt: skip
    assert_near(params, [value.float() for value in wanted])


@pytest.mark.parametrize("make", [
    lambda: torch.zeros((), dtype=torch.int32),
    lambda: torch.zeros(()),
    lambda: torch.zeros(1, dtype=torch.int64),
    lambda: [torch.zeros(()) for _ in SIZES],
], ids=["int32", "fp32", "int64", "each"])  # fmt: skip
def test_numbers_of_a_step_may_be_on_the_device(make: Any) -> None:
    params, grads = tensors(), tensors(seed=1)
    same, states, others = tensors(), (zeros(params), zeros(params)), (zeros(params), zeros(params))
    step, lr = make(), torch.tensor(ADAM["lr"])
    scale, factor, found = torch.tensor(8.0), torch.tensor(2.0), torch.zeros(1)
    numbers = {name: value for name, value in ADAM.items() if name != "lr"}
    for number in (1, 2):
        autoamp_kernels.adam_(
            params, grads, *states, lr=lr, **numbers, step=step, advance=True, grad_scale=scale, grad_factor=factor,
            inv_scale=4.0, found_inf=found,
        )  # fmt: skip
        autoamp_kernels.adam_(same, grads, *others, **ADAM, step=number)
    assert_near(params, same, rtol=1e-6)
    assert {int(one) for one in (step if isinstance(step, list) else [step])} == {2}


def test_an_overflow_skips_all_of_it() -> None:
    params, grads = tensors(), tensors(seed=1)
    states, halves, step = (zeros(params), zeros(params)), tensors(seed=2, dtype=torch.float16), torch.zeros(())
    before = [tensor.clone() for tensor in (*params, *states[0], *states[1], *halves)]
    grads[1][0] = math.inf
    autoamp_kernels.adam_(
        params, grads, *states, **ADAM, step=step, advance=True, halves=halves, found_inf=torch.ones(1)
    )
    assert all(map(torch.equal, (*params, *states[0], *states[1], *halves), before))
    assert step == 0


def test_inf_and_nan_stay_where_they_are() -> None:
    params, grads = tensors((100,)), tensors((100,), seed=1, dtype=torch.float16)
    grads[0][3], grads[0][50], grads[0][99] = math.inf, math.nan, -math.inf
    halves = tensors((100,), dtype=torch.bfloat16)
    autoamp_kernels.adam_(params, grads, zeros(params), zeros(params), **ADAM, step=1, halves=halves)
    for values in (params[0], halves[0].float()):
        assert values.isnan().nonzero().flatten().tolist() == [3, 50, 99]


def adam_once(params: list[Tensor], grads: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    params, halves = [param.clone() for param in params], [torch.empty_like(param, dtype=dtype) for param in params]
    states = [param.abs() for param in params], [param.abs() for param in params]
    autoamp_kernels.adam_(params, grads, *states, **ADAM, weight_decay=0.1, step=2, halves=halves)
    return [*params, *states[0], *states[1], *(half.view(torch.int16) for half in halves)]


@pytest.fixture
def variants() -> Iterator[list[str]]:
    before, found = library().cpu_variant, []
    for name in ("plain", "avx2", "avx512"):
        try:
            library().use_cpu_variant(name)
            found.append(name)
        except autoamp_kernels.KernelError:
            pass
    yield found
    library().use_cpu_variant(before)


@pytest.mark.parametrize("dtype", HALF)
def test_all_variants_give_the_same_bits(variants: list[str], dtype: torch.dtype) -> None:
    # Every half value there is, as a gradient; and as a parameter what rounds to subnormals, to inf and to even.
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    near = every.float() * (1 + 2**-9)
    results = []
    for name in variants:
        library().use_cpu_variant(name)
        results.append(adam_once([near, tensors((65536,))[0]], [every, every], dtype))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF)
def test_half_values_round_as_torchs(variant: str, dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    values = torch.cat([every * factor for factor in (1.0, 1 + 2**-9, 1 + 2**-11, 1 + 2**-12, 1 + 3 * 2**-12)])
    params, halves = [values.clone()], [torch.empty_like(values, dtype=dtype)]
    zero = zeros(params)
    autoamp_kernels.adam_(params, zero, zeros(params), zeros(params), **{**ADAM, "lr": 0.0}, step=1, halves=halves)
    finite = ~values.isnan()
    assert torch.equal(halves[0][finite].view(torch.int16), values.to(dtype)[finite].view(torch.int16))
    assert halves[0][~finite].isnan().all()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 70), st.integers(32760, 32780)), min_size=1, max_size=12),
    offset=st.integers(0, 3), threads=st.integers(1, 5), seed=st.integers(0, 1000),
    grad_dtype=st.sampled_from([torch.float32, *HALF]), half_dtype=st.sampled_from(HALF),
)  # fmt: skip
def test_any_sizes_offsets_and_threads(
    sizes: list[int], offset: int, threads: int, seed: int, grad_dtype: torch.dtype, half_dtype: torch.dtype
) -> None:
    """Neighbours in memory stay as they are, whatever the sizes, and however the work is shared out."""

    def cut(flat: Tensor) -> list[Tensor]:
        pieces, at = [], offset
        for size in sizes:
            pieces.append(flat[at : at + size])
            at += size + 1
        return pieces

    total = offset + sum(sizes) + len(sizes)
    flats = [torch.full((total,), 7.0) for _ in range(3)] + [torch.full((total,), 7.0, dtype=half_dtype)]
    params, firsts, seconds, halves = map(cut, flats)
    for param, value in zip(params, tensors(sizes, seed=seed), strict=True):
        param.copy_(value)
    for one in (*firsts, *seconds):
        one.zero_()
    grads = cut(torch.zeros(total, dtype=grad_dtype))
    for grad, value in zip(grads, tensors(sizes, seed=seed + 1), strict=True):
        grad.copy_(value)
    models = [param.clone().requires_grad_() for param in params]
    for model, grad in zip(models, grads, strict=True):
        model.grad = grad.float()
    torch_adam(models, decoupled=True, weight_decay=0.1).step()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        autoamp_kernels.adam_(params, grads, firsts, seconds, **ADAM, weight_decay=0.1, step=1, halves=halves)
    finally:
        torch.set_num_threads(before)
    assert_near(params, models)
    assert all(torch.equal(half, param.to(half_dtype)) for half, param in zip(halves, params, strict=True))
    between = [offset + sum(sizes[: i + 1]) + i for i in range(len(sizes))] + list(range(offset))
    assert all((flat[between] == 7.0).all() for flat in flats)


def test_dense_tensors_in_another_order_are_taken() -> None:
    params = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    grads = [torch.randn_like(params[0])]
    wanted = [params[0].clone().requires_grad_()]
    wanted[0].grad = grads[0]
    torch_adam(wanted, decoupled=True).step()
    states = [torch.zeros_like(params[0])], [torch.zeros_like(params[0])]
    autoamp_kernels.adam_(params, grads, *states, **ADAM, weight_decay=0.01, step=1)
    assert_near(params, wanted)


def test_writes_are_counted() -> None:
    params, grads = tensors((4,)), tensors((4,), seed=1)
    halves = tensors((4,), dtype=torch.bfloat16)
    versions = params[0]._version, halves[0]._version, grads[0]._version
    autoamp_kernels.adam_(params, grads, zeros(params), zeros(params), **ADAM, step=1, halves=halves)
    assert params[0]._version > versions[0]
    assert halves[0]._version > versions[1]
    assert grads[0]._version == versions[2]


def test_compile_goes_around_it() -> None:
    params, grads = tensors((40, 3)), tensors((40, 3), seed=1)
    same = tensors((40, 3))

    def step(params: list[Tensor], grads: list[Tensor], firsts: list[Tensor], seconds: list[Tensor]) -> Tensor:
        grads = [grad * 2 for grad in grads]
        autoamp_kernels.adam_(params, grads, firsts, seconds, **ADAM, step=1)
        return params[0] + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    result = compiled(params, grads, zeros(params), zeros(params))
    step(same, grads, zeros(params), zeros(params))
    assert_near(params, same, rtol=0, atol=0)
    assert torch.equal(result, same[0] + 1)


def test_no_tensors_is_nothing_to_do() -> None:
    autoamp_kernels.adam_([], [], [], [], **ADAM, step=1)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
], ids=str)  # fmt: skip
def test_sgd_is_torchs(variant: str, grad_dtype: torch.dtype, options: dict[str, Any]) -> None:
    params = tensors()
    models = [param.clone().requires_grad_() for param in params]
    reference = torch.optim.SGD(models, lr=0.1, **options)
    # What a buffer holds before the first step does not count.
    buffers = [torch.full_like(param, math.nan) for param in params] if "momentum" in options else None
    halves = tensors(dtype=torch.float16)
    for step in range(3):
        grads = tensors(seed=step + 1, dtype=grad_dtype)
        for model, grad in zip(models, grads, strict=True):
            model.grad = grad.float()
        reference.step()
        autoamp_kernels.sgd_(
            params, [grad * 4 for grad in grads], buffers, lr=0.1, **options, first=step == 0, halves=halves,
            grad_scale=torch.tensor(4.0),
        )  # fmt: skip
    assert_near(params, models, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(half, param.half()) for half, param in zip(halves, params, strict=True))


def test_sgd_with_the_decay_after_the_momentum() -> None:
    params, grads, buffers = tensors(), tensors(seed=1), tensors(seed=2)
    wanted = []
    for param, grad, buffer in zip(params, grads, buffers, strict=True):
        velocity = 0.9 * buffer.double() + grad.double()
        wanted.append((param.double() - 0.1 * (velocity + 0.2 * param.double())).float())
    autoamp_kernels.sgd_(
        params, grads, buffers, lr=torch.tensor(0.1), momentum=0.9, weight_decay=0.2, decay_after_momentum=True
    )
    assert_near(params, wanted, rtol=1e-5, atol=1e-6)


def test_sgd_wants_buffers_for_a_momentum() -> None:
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"momentum=0.9 wants momentum_buffers"):
        autoamp_kernels.sgd_(tensors(), tensors(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "maximize": True}], ids=str)
def test_adagrad_is_torchs(variant: str, grad_dtype: torch.dtype, options: dict[str, Any]) -> None:
    params = tensors()
    models = [param.clone().requires_grad_() for param in params]
    reference = torch.optim.Adagrad(models, lr=0.1, eps=1e-6, **options)
    sums, halves = zeros(params), tensors(dtype=torch.bfloat16)
    for step in range(3):
        grads = tensors(seed=step + 1, dtype=grad_dtype)
        for model, grad in zip(models, grads, strict=True):
            model.grad = grad.float()
        reference.step()
        autoamp_kernels.adagrad_(params, grads, sums, lr=0.1, eps=1e-6, **options, halves=halves)
    assert_near(params, models, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(half, param.bfloat16()) for half, param in zip(halves, params, strict=True))


def test_adagrad_with_a_decoupled_decay() -> None:
    params, grads, sums = tensors(), tensors(seed=1), zeros(tensors())
    wanted = [(param.double() - 0.1 * (grad.double() / (grad.double().abs() + 1e-3) + 0.2 * param.double())).float()
              for param, grad in zip(params, grads, strict=True)]  # fmt: skip
    autoamp_kernels.adagrad_(params, grads, sums, lr=0.1, eps=1e-3, weight_decay=0.2, decoupled=True)
    assert_near(params, wanted, rtol=1e-5, atol=1e-6)
