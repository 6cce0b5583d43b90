"""The optimizers and `amp_C` by the kernels for GPUs, on an emulated one, beside the same by torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autoamp_kernels
import pytest
import torch
from torch import Tensor

from autoamp import kernels
from autoamp.compat.multi_tensor import optimizers as amp_c
from autoamp.optimizers import FusedAdam, FusedLAMB, FusedSGD

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("emulated")]

SHAPES = ((3,), (40, 7), (0,), (5000,))
HALF, WIDE = torch.float16, torch.float32


def tensors(seed: int, dtype: torch.dtype = WIDE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator).add(0.01).to(dtype) for shape in SHAPES]


def by_both(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[Tensor]], kernel: str) -> None:
    """Compare what is written with kernels and without, and see that they ran."""
    ran: list[str] = []

    def watched(name: str, device_type: str) -> Any:
        return lambda *args, **numbers: (getattr(autoamp_kernels, name)(*args, **numbers), ran.append(name))

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "find", watched)
        got = run()
    assert set(ran) == {kernel}
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "find", lambda name, device_type: None)
        want = run()
    for one, other in zip(got, want, strict=True):
        assert one.dtype is other.dtype
        tolerance = 1e-5 if one.dtype is WIDE else 2e-3
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("dtype", [WIDE, HALF])
@pytest.mark.parametrize(("make", "kernel"), [
    (lambda params: FusedAdam(params, weight_decay=0.1), "adam_"),
    (lambda params: FusedAdam(params, adam_w_mode=False, capturable=True), "adam_"),
    (lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1), "sgd_"),
    (lambda params: FusedSGD(params, lr=0.1, weight_decay=0.1, wd_after_momentum=True), "sgd_"),
    (lambda params: FusedLAMB(params), "lamb_"),
])  # fmt: skip
def test_optimizers(monkeypatch: pytest.MonkeyPatch, make: Any, kernel: str, dtype: torch.dtype) -> None:
    def run() -> list[Tensor]:
        params = [torch.nn.Parameter(one) for one in tensors(0, dtype)]
        optimizer = make(params)
        for number in range(1, 4):
            for param, grad in zip(params, tensors(number, dtype), strict=True):
                param.grad = grad
            optimizer.step()
        states = [one for param in params for one in optimizer.state[param].values()]
        return [*(param.detach() for param in params), *states]

    by_both(monkeypatch, run, kernel)


def test_masters_are_stepped_with_their_half_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        params = [torch.nn.Parameter(one) for one in tensors(0, HALF)]
        optimizer = FusedAdam(params, master_weights=True)
        for param, grad in zip(params, tensors(1, HALF), strict=True):
            param.grad = grad
        optimizer.step()
        masters = [optimizer.state[param]["master_param"] for param in params]
        assert all(torch.equal(param, master.half()) for param, master in zip(params, masters, strict=True))
        return masters

    by_both(monkeypatch, run, "adam_")


@pytest.mark.parametrize(("kernel", "step", "states"), [
    ("sgd_", lambda f, t: amp_c.multi_tensor_sgd(9, f, t, 0.1, 0.9, 0.1, 0.1, False, False, False, 0.5), 1),
    ("sgd_", lambda f, t: amp_c.multi_tensor_sgd(9, f, t, 0.1, 0.9, 0.0, 0.1, True, True, True), 1),
    ("adam_", lambda f, t: amp_c.multi_tensor_adam(9, f, t, 0.1, 0.9, 0.99, 1e-6, 3, 1, 0, 0.1), 2),
    ("lamb_", lambda f, t: amp_c.multi_tensor_lamb(9, f, t, 0.1, 0.9, 0.99, 1e-6, 3, 1, 0.1, 1, 1, 50.0, 1.0), 2),
    ("lamb_", lambda f, t: amp_c.multi_tensor_lamb(9, f, t, 0.1, 0.9, 0.99, 1e-6, 3, 0, 0.1, 0, 0, float("nan"), 1.0),
     2),
])  # fmt: skip
def test_amp_c(monkeypatch: pytest.MonkeyPatch, kernel: str, step: Any, states: int) -> None:
    def run(flag: int = 0) -> list[Tensor]:
        lists = [tensors(0, HALF), tensors(1), *(tensors(2 + state) for state in range(states))]
        lists += [tensors(9, HALF)] if kernel == "sgd_" else []
        step(torch.tensor([flag], dtype=torch.int32), lists)
        return [one for some in lists for one in some]

    by_both(monkeypatch, run, kernel)
    by_both(monkeypatch, lambda: run(1), kernel)
    untouched = [tensors(0, HALF), tensors(1)]
    assert all(map(torch.equal, run(1), [one for some in untouched for one in some]))
