"""Scaling, unscaling and checking many gradients at once, and their norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from autoamp.core import (
    Scale,
    found_any,
    non_finite,
    scale_,
    scale_ratio,
    total_norm,
    true_gradient,
    unscale_,
    widened,
)
from autoamp.errors import UsageError
from tests.waits import counted_reads

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*REAL, torch.complex64]
BAD = [math.inf, -math.inf, math.nan]


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
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (size, *values.shape[1:]), check_invariants=False)


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.tensor([[4.0, 8.0]]).t()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unscale_divides_in_place(dtype: torch.dtype, device: str) -> None:
    grads = [torch.randn(3, 2, device=device).to(dtype), torch.randn(5, device=device).to(dtype)]
    expected = [grad * 0.125 for grad in grads]
    params = [with_grad(grad) for grad in grads] + [Parameter(torch.zeros(2))]
    found = unscale_(params, 8.0)
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=False))
    assert all(torch.equal(grad, want) for grad, want in zip(grads, expected, strict=True))
    assert [(flag.dtype, flag.shape) for flag in found] == [(torch.float32, (1,))]
    assert found_any(found) == [False]
    scale_(params, 8.0)
    assert all(torch.equal(grad, want * 8.0) for grad, want in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", BAD)
def test_unscale_finds_one_bad_element(dtype: torch.dtype, bad: float, device: str) -> None:
    grads = [torch.ones(7, device=device).to(dtype), torch.ones(3, device=device)]
    grads[0][4] = bad
    for scale in (2.0, 1.0, 0.5):
        assert found_any(unscale_([with_grad(grad) for grad in grads], scale)) == [True]
    assert grads[1].tolist() == [1.0] * 3


class Operators(TorchDispatchMode):
    """Counts the operators that begin like torch's for many gradients."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.overloadpacket.__name__.startswith(("_amp", "_foreach"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_gradients_of_a_dtype_are_one_operator(scale: float) -> None:
    params = [with_grad(torch.ones(2, dtype=dtype)) for dtype in REAL[:3] * 10]
    with Operators() as operators:
        (found,) = unscale_(params, scale)
    assert (operators.calls, float(found)) == (3, 0.0)
    assert all(grad_of(param).eq(1.0 / scale).all() for param in params)


def test_without_gradients_there_is_no_flag() -> None:
    assert unscale_([Parameter(torch.zeros(2))], 2.0) == unscale_([], 2.0) == found_any([]) == []


def test_a_gradient_of_two_parameters_is_unscaled_once() -> None:
    shared = with_grad(torch.full((2,), 8.0))
    twin = with_grad(grad_of(shared))
    unscale_([shared, shared, twin], 2.0)
    assert grad_of(shared).tolist() == [4.0, 4.0]
    scale_([shared, shared, twin], 0.5)
    assert grad_of(twin).tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale", [2.0, 0.25])
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
        lambda: torch.arange(9.0).as_strided((2, 3), (4, 2)),
        lambda: torch.arange(5.0).as_strided((3, 2), (1, 2)),
        lambda: torch.zeros(0),
        lambda: torch.tensor(3.0),
        lambda: torch.arange(3.0).mul(1 + 2j),
        lambda: torch.arange(3.0).mul(1 + 2j).conj(),
        lambda: torch.arange(3.0).mul(1 + 2j).conj().imag,
        lambda: torch.arange(1.0, 2.0).mul(1 + 2j).conj().imag,
        lambda: torch.arange(4.0).view(2, 2).to_sparse_csr(),
        lambda: torch.arange(4.0).view(2, 2).to_sparse(),
        lambda: sparse(torch.tensor([4.0, 8.0]), [0, 0], 2),
        lambda: torch.arange(3.0).half(),
        lambda: torch.arange(6.0).half().view(2, 3).t(),
        lambda: torch.arange(3.0).double(),
        inference_tensor,
    ],
    ids=lambda make: f"line{make.__code__.co_firstlineno}",
)
def test_any_layout_comes_out_right_among_others(make: Callable[[], Tensor], scale: float) -> None:
    given = make()
    expected = (given.to_dense() if given.layout is not torch.strided else given).clone()
    params = [with_grad(torch.ones(2)), with_grad(given), with_grad(torch.ones(2))]
    found = unscale_(params, scale)
    assert torch.equal(grad_of(params[1]).to_dense(), expected / scale)
    scale_(params, 4.0)
    assert torch.equal(grad_of(params[1]).to_dense(), expected / scale * 4.0)
    assert [grad_of(param).tolist() for param in params[::2]] == [[4.0 / scale] * 2] * 2
    assert found_any(found) == [False]


@pytest.mark.parametrize(
    ("size", "strides"), [((3, 2), (1, 3)), ((2, 3), (4, 1)), ((2, 3), (3, 1)), ((1, 2, 3), (0, 1, 2)), ((2,), (3,))]
)
def test_a_gradient_whose_elements_share_no_memory_is_written_in_place(
    size: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    grad = torch.arange(8.0).as_strided(size, strides)
    param = with_grad(grad)
    scale_([param], 2.0)
    unscale_([param], 0.5)
    assert grad_of(param) is grad
    assert torch.equal(grad, torch.arange(8.0).as_strided(size, strides) * 4.0)


def test_an_expanded_gradient_leaves_its_source_alone_and_is_unscaled_once_for_each() -> None:
    source = torch.ones(1)
    grad = source.expand(3)
    params = [with_grad(grad), with_grad(grad)]
    unscale_(params, 2.0)
    assert [grad_of(param).tolist() for param in params] == [[0.5] * 3] * 2
    assert source.item() == 1.0


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_with_a_graph_is_unscaled() -> None:
    param = Parameter(torch.ones(2))
    (param**2).sum().mul(8.0).backward(create_graph=True)
    assert grad_of(param).requires_grad
    unscale_([param], 8.0)
    assert grad_of(param).tolist() == [2.0, 2.0]
    param.grad = None
    for dtype in REAL:
        leaf = with_grad(torch.ones(2, dtype=dtype, requires_grad=True))
        scale_([leaf], 8.0)
        unscale_([leaf], 2.0)
        assert grad_of(leaf).tolist() == [4.0, 4.0]


def test_an_overflow_of_a_sum_or_of_unscaling_is_found() -> None:
    for dtype in (torch.float16, torch.float32):
        param = with_grad(sparse(torch.full((2, 1), 60000.0, dtype=dtype), [1, 1]))
        assert found_any(unscale_([param], 2.0)) == [dtype is torch.float16]
    # What a scale below 1 pushes out of range is found too.
    assert found_any(unscale_([with_grad(torch.full((2,), 40000.0, dtype=torch.float16))], 0.5)) == [True]


@pytest.mark.parametrize("scale", [2.0**-16, 2.0**-20, 2.0**26])
def test_a_factor_that_half_precision_does_not_hold(scale: float, half: torch.dtype, device: str) -> None:
    """At O3 gradients are half, and those of an earlier block are brought to a scale of 65536: 0 stays 0."""
    small = 2.0**-10 if scale < 1 else 2.0**14
    for do in (lambda params: scale_(params, 1.0 / scale), lambda params: unscale_(params, scale)):
        param = with_grad(torch.tensor([0.0, small, -small], dtype=half, device=device))
        assert not any(map(bool, do([param]) or []))
        assert grad_of(param).tolist() == [0.0, small / scale, -small / scale]


def test_a_dtype_that_cannot_be_scaled_is_named_and_nothing_is_changed() -> None:
    params = [with_grad(torch.ones(2)), with_grad(torch.ones(2).to(torch.float8_e4m3fn))]
    for do in (unscale_, scale_):
        with pytest.raises(UsageError, match="float8_e4m3fn cannot be scaled"):
            do(params, 0.5)
    assert grad_of(params[0]).tolist() == [1.0, 1.0]


def test_integers_are_left_alone() -> None:
    tensor = torch.ones(2, dtype=torch.int64)
    tensor.grad = torch.full((2,), 4)
    assert unscale_([tensor], 2.0) == []
    assert tensor.grad.tolist() == [4, 4]


# -- scales that only the device knows --


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("scale", [1000.1, 1.0, 3.0, 2.0**24])
@pytest.mark.parametrize("bad", [None, *BAD])
def test_a_scale_on_the_device_unscales_as_the_float(dtype: torch.dtype, scale: float, bad: float | None) -> None:
    on_device = torch.tensor(scale)
    outcomes: list[list[Tensor]] = []
    for given in (on_device.item(), on_device):
        grads = [torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(3)]
        grads[1][2] = 7.0 if bad is None else bad
        outcomes.append([*unscale_(map(with_grad, grads), given), *grads])
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*outcomes, strict=True))
    assert bool(outcomes[0][0]) == (bad is not None)
    assert torch.equal(on_device, torch.tensor(scale))


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize(("above", "below"), [(2.0**16, 1.0), (512.0, 1024.0), (1000.1, 3.3)])
def test_a_ratio_on_the_device_scales_as_the_float(dtype: torch.dtype, above: float, below: float) -> None:
    scale: Scale = torch.tensor(above)
    outcomes = []
    for given in (scale.item(), scale):
        grad = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
        scale_([with_grad(grad)], scale_ratio(given, below))
        outcomes.append(grad)
    assert torch.equal(*outcomes)


# -- flags, names, norms --


def test_flags_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = counted_reads(monkeypatch)
    assert found_any([torch.tensor([value]) for value in (0.0, 1.0, 0.0, 2.0)]) == [False, True, False, True]
    assert reads == [4]
    assert found_any([torch.zeros(1), torch.ones(1)]) == [False, True]


def test_non_finite_names_the_first() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    named = [("a", good), ("b", bad), ("c", sparse(bad.view(2, 1), [0, 1])), ("d", good), ("e", bad), ("f", bad)]
    assert non_finite(named) == ["b", "c", "e"]
    assert non_finite(named, limit=1) == ["b"]
    assert non_finite(named[:1]) == []
    # What comes after the last name is not looked at.
    left = iter(named)
    assert non_finite(left, limit=1) == ["b"]
    assert [name for name, _ in left] == ["c", "d", "e", "f"]


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
    # Beyond the range of fp32.
    assert total_norm([torch.tensor([3e200 + 4e200j], dtype=torch.complex128)]).item() == pytest.approx(5e200)
    assert total_norm([torch.tensor([3.0], dtype=torch.float64), torch.tensor([4.0])]).dtype is torch.float64
    assert total_norm([]).item() == total_norm([torch.zeros(0)], math.inf).item() == 0.0
    assert total_norm([torch.tensor([math.nan, 1.0])]).isnan()


# -- one gradient, as it arrives --


def true_of(grad: Tensor, inv_scale: float = 0.125, *, clean: bool = True) -> tuple[Tensor, bool]:
    """Return the true gradient, and whether an overflow was found."""
    found, factor = torch.zeros(1, device=grad.device), torch.full((), inv_scale, device=grad.device)
    return true_gradient(grad, inv_scale, factor, found, clean=clean), bool(found)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128], ids=str)
@pytest.mark.parametrize("inv_scale", [0.125, 8.0])
def test_a_true_gradient_is_another_tensor(dtype: torch.dtype, inv_scale: float, device: str) -> None:
    grad = torch.randn(3, 2, device=device).to(dtype)
    for given in (grad, grad.t(), grad[:, :1].expand(3, 4), torch.conj(grad), torch._neg_view(grad), grad[0, 0]):
        before = given.clone()
        true, found = true_of(given, inv_scale)
        assert (found, true.dtype) == (False, dtype)
        assert torch.equal(true, before * inv_scale)
        true.add_(1.0)
        assert torch.equal(given, before)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("clean", [True, False])
def test_a_true_gradient_that_overflowed(bad: float, clean: bool, device: str) -> None:
    for grad in (torch.tensor([1.0, bad], device=device), torch.tensor(bad), sparse(torch.tensor([1.0, bad]), [0, 2])):
        true, found = true_of(grad, clean=clean)
        assert found
        dense = true.to_dense()
        assert bool(dense.isfinite().all()) is clean
        assert not dense.any() or not clean


@pytest.mark.parametrize("inv_scale", [1.5, 8.0])
def test_a_true_gradient_that_overflows_as_it_is_multiplied(inv_scale: float) -> None:
    grad = torch.tensor([1.0, 6e4], dtype=torch.float16)
    true, found = true_of(grad, inv_scale, clean=False)
    assert found
    assert true.tolist() == [inv_scale, math.inf]


def test_gradients_of_a_true_gradient_are_not_recorded() -> None:
    grad = torch.ones(2, requires_grad=True) * 1.0
    with torch.enable_grad():
        assert not true_of(grad)[0].requires_grad
        assert not widened([grad.half()])[0].requires_grad
        assert not total_norm([grad]).requires_grad


def test_a_true_gradient_of_sparse_halves_is_checked_after_coalescing() -> None:
    for value, dtype in ((6e4, torch.float16), (2e4, torch.float32)):
        true, found = true_of(sparse(torch.full((2,), value, dtype=dtype), [1, 1]))
        assert found is (dtype is torch.float16)
        assert true.to_dense().tolist() == [0.0, 0.0 if found else 5e3, 0.0, 0.0]


def test_a_true_gradient_of_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(UsageError, match="float8_e4m3fn cannot be scaled"):
        true_of(torch.zeros(2).to(torch.float8_e4m3fn))


# -- parts of DTensors, and wider copies --


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("bad", [None, math.inf])
def test_of_a_dtensor_the_part_of_this_rank_is_taken(dtype: torch.dtype, bad: float | None) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def sharded(value: float) -> DTensor:
        local = torch.tensor([3.0, 4.0 if bad is None else bad], dtype=dtype) * value
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    expected = [3.0, 4.0 if bad is None else bad]
    param = Parameter(sharded(1.0))
    param.grad = sharded(8.0)
    assert found_any(unscale_([param], 8.0)) == [bad is not None]
    assert grad_of(param).to_local().tolist() == expected  # type: ignore[attr-defined]
    scale_([param], 2.0)
    true, found = true_of(grad_of(param), 0.5)
    assert (true.to_local().tolist(), found) == (expected, bad is not None)  # type: ignore[attr-defined]
    assert non_finite([("weight", true)]) == (["weight"] if bad else [])
    (wide,) = widened([true])
    assert wide.to_local().dtype is (dtype if dtype in REAL[2:] else torch.float32)  # type: ignore[attr-defined]
    assert wide.to_local().tolist() == expected  # type: ignore[attr-defined]


def test_halves_are_widened_and_others_stay() -> None:
    given = [torch.ones(2), torch.ones(2).half(), sparse(torch.ones(1, 1).half(), [1]), torch.ones(1).double()]
    wide = widened(iter(given))
    assert [tensor.dtype for tensor in wide] == [torch.float32, torch.float32, torch.float32, torch.float64]
    assert (wide[0] is given[0], wide[3] is given[3]) == (True, True)
    assert [tensor.to_dense().flatten().tolist() for tensor in wide[1:3]] == [[1.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    assert widened([]) == []
