"""Scaling, unscaling and checking many gradients at once, and their norm."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from autoamp.errors import UsageError
from autoamp.scaling import gradients
from autoamp.scaling.device_scale import DeviceScale, inverse_scale, scale_ratio
from autoamp.scaling.gradients import (
    GradientMark,
    ScaledMark,
    UsualGradients,
    found_any,
    non_finite,
    scale_,
    total_norm,
    true_gradient,
    unscale_,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def with_grad(grad: Tensor) -> Parameter:
    """Return a parameter whose gradient is exactly ``grad``."""
    dense = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    param = Parameter(dense.to_sparse_csr() if grad.layout is torch.sparse_csr else dense)
    param.grad = grad
    return param


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def sparse(values: Tensor, rows: list[int], size: int = 4) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.sparse_coo_tensor(torch.tensor([rows]), values, (size, *values.shape[1:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unscale_multiplies_in_place(dtype: torch.dtype, device: str) -> None:
    grads = [torch.randn(3, 2, device=device).to(dtype), torch.randn(5, device=device).to(dtype)]
    expected = [grad * 0.125 for grad in grads]
    params = [with_grad(grad) for grad in grads] + [Parameter(torch.zeros(2))]
    found = unscale_(params, 0.125)
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=False))
    assert all(torch.equal(grad, want) for grad, want in zip(grads, expected, strict=True))
    assert [(flag.dtype, flag.shape) for flag in found] == [(torch.float32, (1,))]
    assert found_any(found) == [False]
    scale_(params, 8.0)
    assert all(torch.equal(grad, want * 8.0) for grad, want in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_unscale_finds_one_bad_element(dtype: torch.dtype, bad: float, device: str) -> None:
    grads = [torch.ones(7, device=device).to(dtype), torch.ones(3, device=device)]
    grads[0][4] = bad
    assert found_any(unscale_([with_grad(grad) for grad in grads], 0.5)) == [True]


def test_mixed_dtypes_are_one_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[torch.dtype]] = []
    kernel = gradients.unscale_and_check_

    def counted(tensors: list[Tensor], *rest: Tensor) -> None:
        calls.append([tensor.dtype for tensor in tensors])
        kernel(tensors, *rest)

    monkeypatch.setattr(gradients, "unscale_and_check_", counted)
    params = [with_grad(torch.ones(2, dtype=dtype)) for dtype in DTYPES[:3] * 10]
    found = unscale_(params, 0.5)
    assert sorted(map(len, calls)) == [10, 10, 10]
    assert len(found) == 1
    assert all(grad_of(param).eq(0.5).all() for param in params)


def test_no_gradient_gives_no_flag() -> None:
    assert unscale_([Parameter(torch.zeros(2))], 0.5) == []
    assert unscale_([], 0.5) == []
    assert found_any([]) == []


def test_what_comes_twice_is_unscaled_once() -> None:
    shared = with_grad(torch.full((2,), 8.0))
    twin = with_grad(grad_of(shared))
    unscale_([shared, shared, twin], 0.5)
    assert grad_of(shared).tolist() == [4.0, 4.0]
    scale_([shared, shared, twin], 0.5)
    assert grad_of(twin).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        lambda: torch.arange(12.0)[::2],
        lambda: torch.arange(12.0).view(3, 4)[:, 1:3],
        lambda: torch.ones(1).expand(5),
        lambda: torch.arange(3.0).view(3, 1).expand(3, 4),
        lambda: torch.arange(4.0).as_strided((3, 2), (1, 1)),
        lambda: torch.zeros(0),
        lambda: torch.tensor(3.0),
        lambda: torch.arange(3.0).mul(1 + 2j).conj(),
        lambda: torch.arange(3.0).mul(1 + 2j).conj().imag,
        lambda: torch.arange(1.0, 2.0).mul(1 + 2j).conj().imag,
        lambda: torch.arange(4.0).view(2, 2).to_sparse_csr(),
        lambda: torch.arange(4.0).view(2, 2).to_sparse(),
    ],
    ids=lambda make: f"line{make.__code__.co_firstlineno}",
)
def test_any_layout_comes_out_right(make: Callable[[], Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        param, expected = with_grad(make()), make().to_dense() if make().layout is not torch.strided else make().clone()
        found = unscale_([param], 0.5)
        assert torch.equal(grad_of(param).to_dense(), expected * 0.5)
        scale_([param], 4.0)
        assert torch.equal(grad_of(param).to_dense(), expected * 2.0)
        assert found_any(found) == [False]


def test_a_view_into_a_flat_buffer_stays_one() -> None:
    buffer = torch.arange(12.0)
    param = with_grad(buffer.view(3, 4)[:, 1:3])
    unscale_([param], 0.5)
    assert buffer.tolist() == [0, 0.5, 1, 3, 4, 2.5, 3, 7, 8, 4.5, 5, 11]


def test_an_expanded_gradient_leaves_its_source_alone() -> None:
    source = torch.ones(1)
    param = with_grad(source.expand(3))
    unscale_([param], 0.5)
    assert grad_of(param).tolist() == [0.5] * 3
    assert source.item() == 1.0


def test_a_shared_expanded_gradient_is_unscaled_once_for_each() -> None:
    grad = torch.ones(1).expand(3)
    params = [with_grad(grad), with_grad(grad)]
    unscale_(params, 0.5)
    assert [grad_of(param).tolist() for param in params] == [[0.5] * 3] * 2


def test_inference_tensors_are_replaced() -> None:
    with torch.inference_mode():
        grads = [torch.ones(2), torch.ones(2, 2).t()[:1]]
    params = [with_grad(grad) for grad in grads]
    unscale_(params, 0.5)
    scale_(params, 4.0)
    assert all(grad_of(param).eq(2.0).all() for param in params)
    with torch.inference_mode():
        scale_(params, 0.5)
    assert all(grad_of(param).eq(1.0).all() for param in params)


def learnt(count: int, **kwargs: Any) -> UsualGradients:
    """Return what two calls learn of ``count`` gradients of two elements."""
    usual = UsualGradients()
    for _ in range(2):
        unscale_([with_grad(torch.ones(2, **kwargs)) for _ in range(count)], 0.5, usual)
    return usual


def test_gradients_like_those_of_before_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = learnt(3)
    monkeypatch.setattr(gradients, "_grouped", None)
    grads = [torch.tensor([4.0, 8.0]) for _ in range(3)]
    found = unscale_([Parameter(torch.zeros(2)), *map(with_grad, grads)], 0.5, usual)
    assert [grad.tolist() for grad in grads] == [[2.0, 4.0]] * 3
    assert found_any(found) == [False]
    grads[1][0] = math.nan
    assert found_any(unscale_([*map(with_grad, grads)], 0.5, usual)) == [True]


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.tensor([4.0, 8.0])


@pytest.mark.parametrize("inv_scale", [0.5, 4.0])
@pytest.mark.parametrize(
    "make",
    [
        inference_tensor,
        lambda: torch.tensor([4.0]).expand(2),
        lambda: torch.tensor([4.0, 0.0, 8.0])[::2],
        lambda: sparse(torch.tensor([4.0, 8.0]), [0, 0], 2),
        lambda: torch.tensor([4.0, 8.0]).half(),
        lambda: torch.tensor([4.0, 8.0]).double(),
        lambda: torch.tensor([4.0 + 2.0j, 8.0]),
    ],
)
def test_what_was_learnt_hides_no_odd_gradient(make: Callable[[], Tensor], inv_scale: float) -> None:
    wanted = make().clone().to_dense() * inv_scale
    params = [with_grad(torch.ones(2)), with_grad(make()), with_grad(torch.ones(2))]
    assert not any(found_any(unscale_(params, inv_scale, learnt(3))))
    grads = [grad_of(param).to_dense() for param in params]
    assert torch.equal(grads[1], wanted)
    assert grads[0].tolist() == grads[2].tolist() == [inv_scale] * 2


def test_what_was_learnt_hides_no_gradient_that_comes_twice() -> None:
    shared = torch.ones(2)
    unscale_([with_grad(shared), with_grad(shared)], 0.5, learnt(2))
    assert shared.tolist() == [0.5, 0.5]


def test_fp64_that_was_learnt_keeps_its_digits() -> None:
    grad = torch.full((2,), 1.0 + 2.0**-40, dtype=torch.float64)
    unscale_([with_grad(grad)], 1 / 3, learnt(1, dtype=torch.float64))
    assert grad.tolist() == [(1.0 + 2.0**-40) * (1 / 3)] * 2


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_with_a_graph_is_unscaled() -> None:
    param = Parameter(torch.ones(2))
    (param**2).sum().mul(8.0).backward(create_graph=True)
    assert grad_of(param).requires_grad
    unscale_([param], 0.125)
    assert grad_of(param).tolist() == [2.0, 2.0]
    param.grad = None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sparse_gradients(dtype: torch.dtype) -> None:
    embedding = torch.nn.Embedding(6, 3, sparse=True, dtype=dtype)
    (embedding(torch.tensor([1, 1, 4])) * 8).sum().backward()
    found = unscale_([embedding.weight], 0.125)
    grad = grad_of(embedding.weight)
    assert grad.is_sparse
    assert grad.to_dense()[:, 0].tolist() == [0, 2, 0, 0, 1, 0]
    assert found_any(found) == [False]
    scale_([embedding.weight], 4.0)
    assert grad_of(embedding.weight).to_dense()[:, 0].tolist() == [0, 8, 0, 0, 4, 0]


def test_a_sum_of_sparse_halves_that_overflows_is_found() -> None:
    param = with_grad(sparse(torch.full((2, 1), 60000.0, dtype=torch.float16), [1, 1]))
    assert found_any(unscale_([param], 0.5)) == [True]
    assert found_any(unscale_([with_grad(sparse(torch.full((2, 1), 60000.0), [1, 1]))], 0.5)) == [False]


def test_a_scale_below_one_is_checked_after_it() -> None:
    param = with_grad(torch.full((2,), 40000.0, dtype=torch.float16))
    assert found_any(unscale_([param], 2.0)) == [True]


@pytest.mark.parametrize("factor", [2.0**16, 2.0**20, 2.0**-26])
def test_a_factor_that_half_precision_does_not_hold(factor: float, half: torch.dtype, device: str) -> None:
    """At O3 gradients are half, and those of an earlier block are brought to a scale of 65536: 0 stays 0."""
    small = 2.0**-10 if factor > 1 else 2.0**14
    params = [with_grad(torch.tensor([0.0, small, -small], dtype=half, device=device))]
    scale_(params, factor)
    assert params[0].grad.tolist() == [0.0, small * factor, -small * factor]
    params[0].grad = torch.tensor([0.0, small, -small], dtype=half, device=device)
    (found,) = unscale_(params, factor)
    assert params[0].grad.tolist() == [0.0, small * factor, -small * factor]
    assert found.item() == 0.0


def test_fp64_keeps_its_digits() -> None:
    param = with_grad(torch.tensor([3.0], dtype=torch.float64))
    found = unscale_([param], 1 / 3)
    assert grad_of(param).item() == 3.0 * (1 / 3)
    assert found_any(found) == [False]
    assert found_any(unscale_([with_grad(torch.tensor([math.nan], dtype=torch.float64))], 1 / 3)) == [True]


def test_what_cannot_be_scaled_is_named() -> None:
    param = with_grad(torch.ones(2).to(torch.float8_e4m3fn))
    with pytest.raises(UsageError, match="float8_e4m3fn"):
        unscale_([param], 0.5)
    with pytest.raises(UsageError, match="float8_e4m3fn"):
        scale_([param], 0.5)


def test_integers_are_left_alone() -> None:
    tensor = torch.ones(2, dtype=torch.int64)
    tensor.grad = torch.full((2,), 4)
    assert unscale_([tensor], 0.5) == []
    assert tensor.grad.tolist() == [4, 4]


def test_found_any_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(self.numel()) or tolist(self))
    assert found_any([torch.tensor([value]) for value in (0.0, 1.0, 0.0, 2.0)]) == [False, True, False, True]
    assert reads == [4]


def test_non_finite_names_the_first() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    named = [("a", good), ("b", bad), ("c", sparse(bad.view(2, 1), [0, 1])), ("d", good), ("e", bad), ("f", bad)]
    assert non_finite(named) == ["b", "c", "e"]
    assert non_finite(named, limit=1) == ["b"]
    assert non_finite([("a", good)]) == []


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_the_norm_is_that_of_one_vector(norm_type: float, device: str) -> None:
    tensors = [torch.randn(4, 3, device=device), torch.randn(5, device=device), torch.zeros(0, device=device)]
    expected = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors]), norm_type)
    norm = total_norm(tensors, norm_type)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    torch.testing.assert_close(norm, expected)


def test_the_norm_of_halves_does_not_overflow(half: torch.dtype) -> None:
    tensors = [torch.full((100,), 30000.0).to(half), torch.full((100,), 30000.0)]
    expected = torch.linalg.vector_norm(torch.cat([tensor.double() for tensor in tensors]))
    torch.testing.assert_close(total_norm(tensors).double(), expected, rtol=1e-6, atol=0)


def test_the_norm_of_sparse_and_complex_tensors() -> None:
    assert total_norm([sparse(torch.tensor([[3.0], [1.0], [3.0]]), [1, 1, 2])]).item() == 5.0
    assert total_norm([torch.tensor([3 + 4j])], math.inf).item() == 5.0
    assert total_norm([torch.tensor([3.0], dtype=torch.float64), torch.tensor([4.0])]).dtype is torch.float64
    assert total_norm([]).item() == 0.0
    assert total_norm([torch.zeros(0)], math.inf).item() == 0.0
    assert total_norm([torch.tensor([math.nan, 1.0])]).isnan()


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan])
def test_a_wrong_norm_is_named(norm_type: float) -> None:
    with pytest.raises(UsageError, match="norm_type="):
        total_norm([torch.ones(2)], norm_type)


CHANGES: dict[str, tuple[Callable[[Parameter, torch.optim.Optimizer], Any], bool, bool]] = {
    "nothing": (lambda param, optimizer: None, False, False),
    "backward": (lambda param, optimizer: param.sum().backward(), True, False),
    "zero": (lambda param, optimizer: optimizer.zero_grad(set_to_none=False), True, False),
    "none": (lambda param, optimizer: optimizer.zero_grad(), True, True),
    "other": (lambda param, optimizer: setattr(param, "grad", torch.ones(2)), True, True),
    "clip": (lambda param, optimizer: torch.nn.utils.clip_grad_norm_([param], 0.1), True, False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_mark_sees_changes(change: str) -> None:
    do, touched, replaced = CHANGES[change]
    param = Parameter(torch.ones(2))
    param.sum().backward()
    mark = GradientMark([Parameter(torch.ones(1)), param])
    do(param, torch.optim.SGD([param]))
    gc.collect()
    assert (mark.touched(), mark.replaced()) == (touched, replaced)


def test_a_mark_keeps_nothing_alive() -> None:
    param = Parameter(torch.ones(2))
    param.sum().backward()
    mark, grad, reference = GradientMark([param]), weakref.ref(grad_of(param)), weakref.ref(param)
    del param
    assert grad() is None
    assert reference() is None
    assert mark.replaced()
    assert GradientMark([]).replaced()


def test_a_mark_takes_inference_tensors() -> None:
    with torch.inference_mode():
        param = with_grad(torch.ones(2))
    assert not GradientMark([param]).touched()
    assert gradients.GradientMark([Parameter(torch.ones(1))]).touched()


# -- factors that only the device knows --


def given_gradients(dtype: torch.dtype) -> list[Parameter]:
    params = [Parameter(torch.zeros(5, dtype=dtype)) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for param in params:
        param.grad = torch.randn(5, generator=generator).to(dtype)
    return params


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("scale", "lowest"), [(1000.1, 1.0), (1000.1, 0.25), (0.3, 0.25), (2.0**-14, 2.0**-14)])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan, 60000.0])
def test_a_scale_on_the_device_unscales_as_the_float(
    dtype: torch.dtype, scale: float, lowest: float, bad: float | None
) -> None:
    scale = torch.tensor(scale).item()
    outcomes = []
    for factor in (1.0 / scale, inverse_scale(DeviceScale(torch.tensor(scale), lowest))):
        params = given_gradients(dtype)
        if bad is not None:
            params[1].grad[2] = bad  # type: ignore[index]
        found = unscale_(params, factor)
        outcomes.append([tensor.clone() for tensor in (*found, *(param.grad for param in params))])  # type: ignore[union-attr]
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*outcomes, strict=True))
    assert bool(outcomes[0][0]) == (bad is not None and not (bad == 60000.0 and (dtype, scale) not in LEAVES_RANGE))


# Where 60000 divided by the scale is too large for the dtype.
LEAVES_RANGE = [(torch.float16, torch.tensor(0.3).item()), (torch.float16, 2.0**-14)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("above", "below"), [(2.0**16, 1.0), (512.0, 1024.0), (1000.1, 3.3)])
def test_a_quotient_on_the_device_scales_as_the_float(dtype: torch.dtype, above: float, below: float) -> None:
    above, below = torch.tensor([above, below]).tolist()
    outcomes = []
    for factor in (above / below, scale_ratio(DeviceScale(torch.tensor(above), 1.0), below)):
        params = given_gradients(dtype)
        scale_(params, factor)
        outcomes.append([param.grad for param in params])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))  # type: ignore[arg-type]


DROPS: dict[str, tuple[Callable[[Parameter], object], bool]] = {
    "nothing": (lambda param: None, False),
    "none": (lambda param: setattr(param, "grad", None), True),
    "half": (lambda param: setattr(param, "grad", grad_of(param) * 0.5), False),
    "added": (lambda param: param.sum().backward(), False),
    "anew": (lambda param: (setattr(param, "grad", None), param.sum().backward()), True),
}


@pytest.mark.parametrize("drop", DROPS)
def test_scaled_gradients_are_dropped_or_made_into_others(drop: str) -> None:
    do, dropped = DROPS[drop]
    param = Parameter(torch.ones(2))
    param.sum().backward()
    mark = ScaledMark([Parameter(torch.ones(1)), param])
    do(param)
    assert mark.dropped() is dropped
    mark.end()
    assert not param._backward_hooks


def test_of_two_scaled_gradients_one_may_be_dropped() -> None:
    first, second = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    (first + second).sum().backward()
    mark = ScaledMark([first, second])
    first.grad = None
    assert not mark.dropped()
    second.grad = None
    assert mark.dropped()


def test_a_scaled_mark_keeps_nothing_alive() -> None:
    param = Parameter(torch.ones(2))
    param.sum().backward()
    mark, grad, reference = ScaledMark([param]), weakref.ref(grad_of(param)), weakref.ref(param)
    del param
    assert (grad(), reference()) == (None, None)
    assert mark.dropped()
    mark.end()
    assert ScaledMark([]).dropped()


# -- one gradient, as it arrives --


def true_of(grad: Tensor, inv_scale: float = 0.125, *, clean: bool = True) -> tuple[Tensor, bool]:
    """Return the true gradient, and whether an overflow was found."""
    found, factor = (torch.full((), value, device=grad.device) for value in (0.0, inv_scale))
    return true_gradient(grad, inv_scale, factor, found, clean=clean), bool(found)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128], ids=str)
@pytest.mark.parametrize("inv_scale", [0.125, 8.0])
def test_a_true_gradient_is_another_tensor(dtype: torch.dtype, inv_scale: float, device: str) -> None:
    grad = torch.randn(3, 2, device=device).to(dtype)
    for given in (grad, grad.t(), grad[:, :1].expand(3, 4), torch.conj(grad), torch._neg_view(grad), grad[0, 0]):
        before = given.clone()
        true, found = true_of(given, inv_scale)
        assert not found
        assert true.dtype is dtype
        torch.testing.assert_close(true, before * inv_scale, rtol=0.0, atol=0.0)
        true.add_(1.0)
        assert torch.equal(given, before)


def test_a_true_gradient_of_fp64_is_exact() -> None:
    grad = torch.tensor([1.0 + 2.0**-50], dtype=torch.float64)
    assert torch.equal(true_of(grad, 1.0 / 3.0)[0], grad * (1.0 / 3.0))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("clean", [True, False])
def test_a_true_gradient_that_overflowed(bad: float, clean: bool, device: str) -> None:
    for grad in (
        torch.tensor([1.0, bad], device=device),
        torch.tensor(bad, device=device),
        sparse(torch.tensor([1.0, bad]), [0, 2]),
    ):
        true, found = true_of(grad, clean=clean)
        assert found
        dense = true.to_dense() if true.is_sparse else true
        assert bool(dense.isfinite().all()) is clean
        assert not dense.any() or not clean


def test_a_true_gradient_of_sparse_halves_is_judged_by_its_sums() -> None:
    true, found = true_of(sparse(torch.full((2,), 6e4, dtype=torch.float16), [1, 1]))
    assert found
    assert not true.to_dense().any()
    true, found = true_of(sparse(torch.full((2,), 2e4), [1, 1]))
    assert not found
    assert torch.equal(true.to_dense(), torch.tensor([0.0, 5e3, 0.0, 0.0]))


def test_a_gradient_of_no_known_dtype_has_no_true_one() -> None:
    with pytest.raises(UsageError, match="float8_e4m3fn cannot be scaled"):
        true_of(torch.zeros(2).to(torch.float8_e4m3fn))
