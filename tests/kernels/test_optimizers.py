"""The steps beside torch's optimizers and autoamp's own by torch's functions, on CPUs and on an emulated GPU."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp.optimizers import FusedLAMB
from tests.kernels.without import WithoutKernels

with contextlib.suppress(ImportError):
    import autoamp_kernels

pytestmark = pytest.mark.client("autoamp_kernels")

SIZES = (1, 3, 16, 0, 33, 1000, 8192, 70001)
HALF = (torch.bfloat16, torch.float16)
BETAS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6}


def emulated_only(test: Any) -> Any:
    """Run a test by the kernels for GPUs alone, on an emulated one."""
    return pytest.mark.emulated(pytest.mark.usefixtures("emulated")(test))


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32, sizes: Any = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def zeros() -> list[Tensor]:
    return [torch.zeros(size) for size in SIZES]


def assert_near(got: list[Tensor], wanted: list[Tensor], *, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=rtol, atol=atol)


def stepped_by(optimizer: torch.optim.Optimizer, models: list[Tensor], grads: list[Tensor]) -> None:
    """Step by gradients in fp32, by torch's functions."""
    for model, grad in zip(models, grads, strict=True):
        model.grad = grad.float()
    with WithoutKernels():
        optimizer.step()


def adam(params: list[Tensor], grads: list[Tensor], *, kernel: str = "adam_", **options: Any) -> list[list[Tensor]]:
    states = [[torch.ones_like(one, dtype=torch.float32) for one in params] for _ in range(2)]
    given = {**BETAS, "weight_decay": 0.1, "step": 2, **options}
    getattr(autoamp_kernels, kernel)(params, grads, *states, **given)
    return states


def lamb(params: list[Tensor], grads: list[Tensor], **options: Any) -> list[list[Tensor]]:
    return adam(params, grads, kernel="lamb_", **options)


def sgd(params: list[Tensor], grads: list[Tensor], **options: Any) -> list[list[Tensor]]:
    states = [[torch.ones_like(one, dtype=torch.float32) for one in params]]
    autoamp_kernels.sgd_(params, grads, *states, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, **options})
    return states


Step = Callable[..., list[list[Tensor]]]


@pytest.fixture(params=[
    pytest.param((lamb, "cpu"), id="lamb"),
    *(pytest.param((step, "cuda"), id=f"emulated-{step.__name__}", marks=pytest.mark.emulated)
      for step in (lamb, adam, sgd)),
])  # fmt: skip
def step(request: pytest.FixtureRequest) -> Step:
    """Each kernel, on each device that has it."""
    if request.param[1] == "cuda":
        request.getfixturevalue("emulated")
    taken: Step = request.param[0]
    return taken


# -- what a step is --


@emulated_only
@pytest.mark.parametrize("half_dtype", [None, *HALF])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(decoupled: bool, half_dtype: torch.dtype | None) -> None:
    params, firsts, seconds = tensors(), zeros(), zeros()
    models = [param.clone().requires_grad_() for param in params]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind(models, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    halves = [torch.empty_like(param, dtype=half_dtype) for param in params] if half_dtype else None
    for number in range(1, 4):
        grads = tensors(number, half_dtype or torch.float32)
        stepped_by(reference, models, grads)
        autoamp_kernels.adam_(
            params, grads, firsts, seconds, **BETAS, step=number, weight_decay=0.1, decoupled=decoupled, halves=halves
        )
    assert_near(params, models)
    assert_near(firsts, [reference.state[model]["exp_avg"] for model in models])
    for half, param in zip(halves or [], params, strict=bool(halves)):
        assert torch.equal(half, param.to(half_dtype))


@emulated_only
@pytest.mark.parametrize("options", [{"bias_correction": False}, {"eps_inside_sqrt": True}], ids=str)
def test_adam_options_of_apex(options: dict[str, Any]) -> None:
    params, grads = tensors(), tensors(1)
    first, second = ([0.1 * grad.double() for grad in grads], [0.01 * grad.double() ** 2 for grad in grads])
    if options.get("bias_correction", True):
        first, second = [one / (1 - 0.9**3) for one in first], [one / (1 - 0.99**3) for one in second]
    inside = "eps_inside_sqrt" in options
    roots = [(one + 1e-6).sqrt() if inside else one.sqrt() + 1e-6 for one in second]
    wanted = [param - 1e-2 * one / root for param, one, root in zip(params, first, roots, strict=True)]
    autoamp_kernels.adam_(params, grads, zeros(), zeros(), **BETAS, step=3, **options)
    assert_near(params, [one.float() for one in wanted])


@emulated_only
@pytest.mark.parametrize("options", [
    {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9, "nesterov": True},
], ids=str)  # fmt: skip
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    params, buffers = tensors(), zeros()
    models = [param.clone().requires_grad_() for param in params]
    reference = torch.optim.SGD(models, lr=0.1, weight_decay=0.1, **options)
    for number in range(1, 4):
        grads = tensors(number, torch.bfloat16)
        stepped_by(reference, models, grads)
        autoamp_kernels.sgd_(
            params, [4 * grad for grad in grads], buffers if options["momentum"] else None, lr=0.1, weight_decay=0.1,
            first=number == 1, inv_scale=0.25, **options,
        )  # fmt: skip
    assert_near(params, models)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled": False, "grad_averaging": False},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "always_adapt": True, "bias_correction": False, "max_norm": 1e6},
], ids=str)  # fmt: skip
def test_lamb_is_that_of_autoamp(device: str, grad_dtype: torch.dtype, options: dict[str, Any]) -> None:
    names = {"decoupled": "adam_w_mode", "always_adapt": "use_nvlamb", "max_norm": "max_grad_norm"}
    options = {"max_norm": 1.0, **options}
    models = [value.requires_grad_() for value in tensors()]
    optimizer = FusedLAMB(
        models, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, **{names.get(name, name): one for name, one in options.items()}
    )
    params, firsts, seconds = tensors(), zeros(), zeros()
    halves = [value.half() for value in params]
    for number in range(1, 4):
        grads = tensors(number, grad_dtype)
        stepped_by(optimizer, models, grads)
        total = torch.cat([grad.float() for grad in grads]).norm()
        autoamp_kernels.lamb_(
            params, grads, firsts, seconds, **BETAS, **options, step=number, halves=halves, global_norm=total
        )
    # A step is up to 1e-2; where gradient and decay cancel, their rounding is a larger part of it.
    assert_near(params, models, rtol=2e-5, atol=3e-5)
    assert_near(seconds, [optimizer.state[model]["exp_avg_sq"] for model in models], rtol=2e-5, atol=1e-5)
    assert all(torch.equal(half, param.half()) for half, param in zip(halves, params, strict=True))


def test_lamb_of_zeros_has_a_trust_ratio_of_one(device: str) -> None:
    params, grads, firsts, seconds = ([torch.zeros(5), torch.ones(5)] for _ in range(4))
    grads[0].fill_(1.0)
    grads[1].zero_(), firsts[1].zero_()
    autoamp_kernels.lamb_(params, grads, firsts, seconds, **BETAS, step=1, always_adapt=True)
    torch.testing.assert_close(params[0], torch.full((5,), -0.01))
    assert torch.equal(params[1], torch.ones(5))


# -- what all steps have in common --


def test_half_tensors_are_computed_in_fp32(step: Step) -> None:
    """Every combination of dtypes, beside fp32 tensors of the same values: bitwise."""
    kinds = [(torch.float32, None), *((torch.float32, half) for half in HALF), *((half, None) for half in HALF)]
    for grad_dtype, (dtype, half_dtype) in itertools.product((torch.float32, *HALF), kinds):
        params, grads = tensors(0, dtype), tensors(1, grad_dtype)
        # inf, nan, a number beyond fp16, one that is subnormal there, one halfway between two
        params[5][:5] = torch.tensor([math.inf, math.nan, 1e5, 3e-6, 1.00048828125])
        wanted = [param.to(torch.float32, copy=True) for param in params]
        halves = [torch.empty_like(param, dtype=half_dtype) for param in params] if half_dtype else None
        states = step(params, grads, halves=halves)
        for got, state in zip(states, step(wanted, [grad.float() for grad in grads]), strict=True):
            torch.testing.assert_close(got, state, rtol=0, atol=0, equal_nan=True)
        rounded = [value.to(dtype) for value in wanted]
        torch.testing.assert_close(params, rounded, rtol=0, atol=0, equal_nan=True)
        if halves:
            copies = [value.to(half_dtype) for value in wanted]
            torch.testing.assert_close(halves, copies, rtol=0, atol=0, equal_nan=True)


def test_an_overflow_skips_all_of_it(step: Step) -> None:
    params, halves = tensors(), tensors(2, torch.float16)
    states = step(params, tensors(1), halves=halves, found_inf=torch.ones(1))
    assert all(map(torch.equal, (*params, *halves), (*tensors(), *tensors(2, torch.float16))))
    assert all(bool((one == 1).all()) for some in states for one in some)


def test_numbers_of_a_step_may_be_on_the_device(step: Step) -> None:
    params, same = tensors(), tensors()
    counted: dict[str, Any] = {} if step is sgd else {"step": torch.tensor(3, dtype=torch.int32)}
    step(params, tensors(1), lr=torch.tensor(0.01), found_inf=torch.zeros(1), **counted)
    step(same, tensors(1), lr=0.01, **({} if step is sgd else {"step": 3}))
    assert_near(params, same, rtol=1e-6)


def test_threads_and_places_in_memory_change_no_bit(step: Step) -> None:
    before, results = torch.get_num_threads(), []
    sizes = (300_000, 5, 70_001)
    for threads, offset in ((1, 0), (3, 0), (1, 1)):
        torch.set_num_threads(threads)
        try:
            params, grads = ([one[offset:] for one in tensors(seed, sizes=[size + offset for size in sizes])]
                             for seed in (0, 1))  # fmt: skip
            for one, value in zip([*params, *grads], [*tensors(0, sizes=sizes), *tensors(1, sizes=sizes)], strict=True):
                one.copy_(value)
            states = step(params, grads)
        finally:
            torch.set_num_threads(before)
        results.append([*params, *itertools.chain(*states)])
    for other in results[1:]:
        if step is lamb:  # on a GPU the order of its sums depends on the alignment
            assert_near(results[0], other, rtol=1e-6)
        else:
            assert all(map(torch.equal, results[0], other))
    assert all(map(torch.equal, results[0], results[1]))


def test_channels_last_parameters_are_taken(step: Step) -> None:
    shape, last = (2, 3, 4, 5), torch.channels_last
    params, grads = ([torch.randn(shape).to(memory_format=last)] for _ in range(2))
    flat = [params[0].clone(memory_format=torch.contiguous_format)]
    step(flat, [grads[0].contiguous()])
    step(params, grads)
    assert_near(params, flat, rtol=1e-6)


def test_autograd_sees_that_parameters_were_written(step: Step) -> None:
    params, grads = [torch.ones(3, requires_grad=True)], [torch.ones(3)]
    loss = (params[0] ** 2).sum()
    with torch.no_grad():
        step(params, grads)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def refused(make: Callable[[], dict[str, Any]], match: str) -> Any:
    return pytest.param(make, match, id=match)


@pytest.mark.parametrize(("make", "match"), [
    refused(lambda: {"grads": []}, "grads has 0 tensors and params has 1"),
    refused(lambda: {"grads": [torch.ones(3)]}, r"grads\[0\] has 3 elements and its parameter 12"),
    refused(lambda: {"grads": [torch.ones(4, 3).t()]}, r"grads\[0\] is not contiguous"),
    refused(lambda: {"grads": [torch.ones(3, 4).to_sparse()]}, r"grads\[0\] is a Tensor of layout torch.sparse_coo"),
    refused(lambda: {"grads": [torch.ones(3, 4, dtype=torch.float64)]}, r"grads\[0\] has dtype torch.float64"),
    refused(lambda: {"grads": [torch.ones(3, 4, device="meta")]}, r"grads\[0\] is on meta"),
    refused(lambda: {"params": [torch.ones(3, 4)] * 2, "grads": [torch.ones(3, 4)] * 2},
            r"params\[0\] and params\[1\] share memory"),
    refused(lambda: {"global_norm": torch.ones(2)}, "global_norm has dtype torch.float32, shape"),
    refused(lambda: {"params": [torch.ones(3, 4).half()], "halves": [torch.ones(3, 4).half()]}, "halves are given"),
])  # fmt: skip
def test_refusals_name_the_tensor_and_change_nothing(make: Callable[[], dict[str, Any]], match: str) -> None:
    given = {"params": [torch.ones(3, 4)], "grads": [torch.ones(3, 4)], **make()}
    params, states = given.pop("params"), [[torch.ones(3, 4) for _ in given["grads"] or [0]] for _ in range(2)]
    with pytest.raises(autoamp_kernels.ArgumentError, match=match):
        autoamp_kernels.lamb_(params, given.pop("grads"), *states, **BETAS, step=1, **given)
    assert all(bool((one == 1).all()) for one in (*params, *itertools.chain(*states)))


def test_gradients_may_be_views_of_one_tensor_but_not_of_a_parameter() -> None:
    base = torch.ones(8)
    params, states = [torch.ones(4), torch.ones(4)], [[torch.ones(4) for _ in range(2)] for _ in range(2)]
    autoamp_kernels.lamb_(params, [base[:4], base[2:6]], *states, **BETAS, step=1)
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"share memory"):
        autoamp_kernels.lamb_(params, [base[:4], params[0]], *states, **BETAS, step=1)


@pytest.mark.emulated
def test_many_tensors_go_by_few_launches(emulated: Callable[[], list[list[int]]]) -> None:
    params, grads = ([torch.ones(3 + index % 2) for index in range(1500)] for _ in range(2))
    lamb(params, grads)
    first = len(emulated())
    assert first <= 3 * 4  # three kernels for each 400 tensors or more
    assert len({float(param[0]) for param in params}) == 1


@emulated_only
def test_a_failure_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_ERROR", "700")
    with pytest.raises(autoamp_kernels.KernelError, match="kernel sgd: the launch failed: an illegal memory access"):
        sgd([torch.ones(3)], [torch.ones(3)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("taken", [adam, lamb, sgd])
def test_on_a_gpu_a_step_is_the_emulated_one(taken: Step, request: pytest.FixtureRequest) -> None:
    found = []
    for where in ("cuda", "cpu"):
        if where == "cpu":
            request.getfixturevalue("emulated")
        params, grads = ([one.to(where) for one in tensors(seed, torch.float32)] for seed in (0, 1))
        found.append([one.cpu() for one in (*params, *itertools.chain(*taken(params, grads)))])
    assert_near(*found, rtol=1e-6)
