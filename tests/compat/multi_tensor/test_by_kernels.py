"""`amp_C` by compiled kernels beside the same by torch's functions: equal but for rounding, flags the very same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp import kernels
from autoamp.compat.multi_tensor import by_kernels
from autoamp.compat.multi_tensor import optimizers as mo
from autoamp.compat.multi_tensor import tensor_lists as tl

HALF, WIDE, BF = torch.float16, torch.float32, torch.bfloat16
SHAPES = [(3,), (40, 7), (0,), (5000,)]

Ran = list[str]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The names of kernels that ran."""
    package, names = pytest.importorskip("autoamp_kernels"), []
    if kernels.opened("cpu") is None:
        pytest.skip(str(kernels.backend("cpu")))

    def told(name: str, kernel: Any) -> Any:
        def called(*args: Any, **options: Any) -> None:
            kernel(*args, **options)
            names.append(name)

        return called

    for name in ("scale_", "axpby_", "adam_", "sgd_", "lamb_", "novograd_", "adagrad_"):
        monkeypatch.setattr(package, name, told(name, getattr(package, name)))
    return names


def flag(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


def tensors(seed: int, dtype: torch.dtype = WIDE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator).add(0.01).to(dtype) for shape in SHAPES]


def near(got: Any, wanted: Any) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype is other.dtype
        tolerance = {HALF: 2e-3, BF: 1.6e-2}.get(one.dtype, 1e-5)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 1e-2)


Step = Callable[[Tensor, list[list[Tensor]]], Any]

STEPS: dict[str, tuple[str, Step, int]] = {
    "sgd": ("sgd_", lambda f, t: mo.multi_tensor_sgd(9, f, t, 0.1, 0.9, 0.1, 0.1, False, False, False, 0.5), 1),
    "first sgd": ("sgd_", lambda f, t: mo.multi_tensor_sgd(9, f, t, 0.1, 0.9, 0.0, 0.1, True, True, True), 1),
    "plain sgd": ("sgd_", lambda f, t: mo.multi_tensor_sgd(9, f, t, 0.1, 0.0, 0.0, 0.1, True, True, True), 1),
    "adam": ("adam_", lambda f, t: mo.multi_tensor_adam(9, f, t, 0.1, 0.9, 0.99, 1e-6, 3, 0, 1, 0.1), 2),
    "adamw": ("adam_", lambda f, t: mo.multi_tensor_adam(9, f, t, 0.1, 0.9, 0.99, 1e-6, 3, 1, 0, 0.1), 2),
    "adagrad": ("adagrad_", lambda f, t: mo.multi_tensor_adagrad(9, f, t, 0.1, 1e-6, 0, 0.1), 1),
    "decoupled adagrad": ("adagrad_", lambda f, t: mo.multi_tensor_adagrad(9, f, t, 0.1, 1e-6, 1, 0.1), 1),
    "lamb": (
        "lamb_",
        lambda f, t: mo.multi_tensor_lamb(9, f, t, 0.1, 0.9, 0.99, 1e-6, 3, 1, 0.1, 1, 1, torch.tensor(50.0), 1.0), 2,
    ),
    "lamb, a norm of nan": (
        "lamb_", lambda f, t: mo.multi_tensor_lamb(9, f, t, 0.1, 0.9, 0.99, 1e-6, 3, 0, 0.1, 0, 0, math.nan, 1.0), 2,
    ),
    "nvlamb without a limit": (
        "lamb_", lambda f, t: mo.multi_tensor_lamb(9, f, t, 0.1, 0.9, 0.99, 1e-6, 3, 1, 0.0, 1, 1, 50.0, -1.0, True), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("grad_dtype", [WIDE, HALF, BF])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_torchs_functions(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, name: str, grad_dtype: torch.dtype
) -> None:
    kernel, step, states = STEPS[name]

    def lists() -> list[list[Tensor]]:
        return [tensors(0, grad_dtype), tensors(1), *(tensors(2 + state) for state in range(states))]

    got, held, wanted = lists(), lists(), lists()
    step(flag(), got)
    step(flag(1), held)
    assert ran == [kernel, kernel]
    assert all(all(map(torch.equal, one, other)) for one, other in zip(held, lists(), strict=True))
    monkeypatch.setattr(kernels, "opened", lambda _: None)
    step(flag(), wanted)
    for one, other in zip(got, wanted, strict=True):
        near(one, other)
    assert len(ran) == 2


def test_sgd_writes_half_copies(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    def stepped() -> list[list[Tensor]]:
        lists = [tensors(0, HALF), tensors(1), tensors(2), tensors(3, HALF)]
        mo.multi_tensor_sgd(9, flag(), lists, 0.1, 0.9, 0.0, 0.1, False, False, False, 0.5)
        return lists

    got = stepped()
    assert ran == ["sgd_"]
    assert all(torch.equal(half, param.half()) for half, param in zip(got[3], got[1], strict=True))
    monkeypatch.setattr(kernels, "opened", lambda _: None)
    for one, other in zip(got, stepped(), strict=True):
        near(one, other)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("norm_type", [0, 2])
def test_novograd(ran: Ran, monkeypatch: pytest.MonkeyPatch, mode: int, norm_type: int) -> None:
    def stepped() -> list[Tensor]:
        lists, norms = [tensors(0, BF), tensors(1), tensors(2)], torch.tensor([1.0, 2.0, 3.0, 4.0])
        args = (0.1, 0.9, 0.99, 1e-6, 3, 1, 0.1, 1, mode, norm_type)
        mo.multi_tensor_novograd(9, flag(), lists, norms, *args)
        return [*lists[1], *lists[2], norms]

    got = stepped()
    assert ran == ["novograd_"]
    monkeypatch.setattr(kernels, "opened", lambda _: None)
    near(got, stepped())


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(HALF, WIDE), (BF, WIDE), (WIDE, WIDE), (HALF, HALF), (HALF, BF)])
def test_scale(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, out_dtype: torch.dtype, bad: float | None
) -> None:
    def scaled(inplace: bool = False) -> list[Tensor]:
        ins, noop = tensors(0, dtype), flag()
        if bad is not None:
            ins[1][3, 4] = bad
        outs = ins if inplace else tensors(1, out_dtype)
        tl.multi_tensor_scale(9, noop, [ins, outs], 0.25)
        assert bool(noop) == (bad is not None)
        return [out.nan_to_num(nan=7.0) for out in outs]

    got = scaled(), scaled(inplace=True)
    assert ran == ["scale_", "scale_"]
    monkeypatch.setattr(kernels, "opened", lambda _: None)
    near(got[0], scaled())
    near(got[1], scaled(inplace=True))


def test_products_that_may_overflow_are_torchs(ran: Ran) -> None:
    for ins, outs, scale in (
        ([torch.full((3,), 6e4)], [torch.ones(3).half()], 1.0), ([torch.ones(3)], [torch.ones(3)], 2.0),
        ([torch.ones(3)], [torch.ones(3)], math.nan),
    ):  # fmt: skip
        assert by_kernels.scaled(ins, outs, scale) is None
    noop = flag()
    tl.multi_tensor_scale(9, noop, [[torch.full((3,), 7e4)], [torch.ones(3).half()]], 1.0)
    assert noop == 1
    assert ran == []


@pytest.mark.parametrize("target", ["new", "x", "y"])
@pytest.mark.parametrize("check", [-1, 0, 1])
@pytest.mark.parametrize("bad", [None, "x", "y"])
def test_axpby(ran: Ran, monkeypatch: pytest.MonkeyPatch, target: str, check: int, bad: str | None) -> None:
    def summed() -> list[Tensor]:
        given, noop = {"x": tensors(0, HALF), "y": tensors(1, HALF), "new": tensors(2)}, flag()
        if bad:
            given[bad][3][4321] = math.inf
        tl.multi_tensor_axpby(9, noop, [given["x"], given["y"], given[target]], 0.5, 3.0, check)
        return [*given[target], noop]

    got = summed()
    assert ran == ["axpby_"]
    assert bool(got[-1]) == (bad is not None and check in (-1, "xy".index(bad)))
    monkeypatch.setattr(kernels, "opened", lambda _: None)
    near(got, summed())


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("name", ["l2norm", "unscale_l2norm", "unscale by a tensor", "l2norm_scale"])
def test_norms(ran: Ran, monkeypatch: pytest.MonkeyPatch, name: str, bad: float | None) -> None:
    def measured(per_tensor: bool) -> list[Tensor]:
        ins, outs, noop = tensors(0, BF), tensors(1, HALF), flag()
        if bad is not None:
            ins[1][3, 4] = bad
        total, each = {
            "l2norm": lambda: tl.multi_tensor_l2norm(9, noop, [ins], per_tensor),
            "unscale_l2norm": lambda: tl.multi_tensor_unscale_l2norm(9, noop, [ins], 0.25, per_tensor),
            "unscale by a tensor": lambda: tl.multi_tensor_unscale_l2norm(
                9, noop, [ins], torch.tensor([0.25]), per_tensor
            ),
            "l2norm_scale": lambda: tl.multi_tensor_l2norm_scale(9, noop, [ins, outs], 0.25, per_tensor),
        }[name]()
        assert bool(noop) == (bad is not None)
        assert total.shape == (1,)
        assert each.shape == (len(SHAPES) if per_tensor else 0,)
        return [one.nan_to_num(nan=7.0) for one in (total, each, *outs)]

    got = measured(True), measured(False)
    assert ran == ["scale_", "scale_"]
    monkeypatch.setattr(kernels, "opened", lambda _: None)
    near(got[0], measured(True))
    near(got[1], measured(False))


def test_lists_of_several_dtypes_are_torchs(ran: Ran) -> None:
    total, _ = tl.multi_tensor_l2norm(9, flag(), [[torch.ones(3), torch.ones(6).half()]])
    assert total == 3
    lists = [tensors(0), tensors(1, BF), tensors(2, BF), tensors(3, BF)]
    mo.multi_tensor_adam(9, flag(), lists, 0.1, 0.9, 0.99, 1e-6, 3, 1, 1, 0.1)
    assert not torch.equal(lists[1][0], tensors(1, BF)[0])
    assert ran == []
