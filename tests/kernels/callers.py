"""A program: an optimizer by the kernels for GPUs, beside the same by torch's functions.

Its argument is the name of a case. It runs with the emulated library and ``EMULATED_CUDA=1``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from autoamp.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.kernels.without import WithoutKernels

SHAPES = ((3,), (40, 7), (0,), (5000,))
HALF, WIDE = torch.float16, torch.float32
KERNELS = ("adam_", "lamb_", "sgd_")


def tensors(seed: int, dtype: torch.dtype = WIDE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator).add(0.01).to(dtype) for shape in SHAPES]


def offer_on_cpu() -> list[str]:
    """Let autoamp find a package that offers all kernels on a CPU; return what notes those that ran."""
    import autoamp_kernels

    ran: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        def run(*args: Any, **numbers: Any) -> None:
            getattr(autoamp_kernels, name)(*args, **numbers)
            ran.append(name)

        return run

    sys.modules["autoamp_kernels"] = SimpleNamespace(  # type: ignore[assignment]
        backends=lambda: (autoamp_kernels.Backend("cpu", KERNELS, "emulated"),),
        ArgumentError=autoamp_kernels.ArgumentError, **{name: noting(name) for name in KERNELS},
    )  # fmt: skip
    return ran


def check(kernel: str, run: Callable[[], list[Tensor]]) -> None:
    """Compare what is written with kernels and without, and see that they ran."""
    ran = offer_on_cpu()
    got = run()
    assert set(ran) == {kernel}, ran
    with WithoutKernels():
        want = run()
    for one, other in zip(got, want, strict=True):
        assert one.dtype is other.dtype
        tolerance = 1e-5 if one.dtype is WIDE else 2e-3
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 1e-2)


def stepped(make: Callable[[list[Any]], Any], dtype: torch.dtype) -> list[Tensor]:
    params = [torch.nn.Parameter(one) for one in tensors(0, dtype)]
    optimizer = make(params)
    for number in range(1, 4):
        for param, grad in zip(params, tensors(number, dtype), strict=True):
            param.grad = grad
        optimizer.step()
    states = [one for param in params for one in optimizer.state[param].values()]
    return [*(param.detach() for param in params), *states]


def stepped_masters() -> list[Tensor]:
    params = [torch.nn.Parameter(one) for one in tensors(0, HALF)]
    optimizer = FusedAdam(params, master_weights=True)
    for param, grad in zip(params, tensors(1, HALF), strict=True):
        param.grad = grad
    optimizer.step()
    masters: list[Tensor] = [optimizer.state[param]["master_param"] for param in params]
    assert all(torch.equal(param, master.half()) for param, master in zip(params, masters, strict=True))
    return masters


OPTIMIZERS: dict[str, tuple[str, Callable[[list[Any]], Any]]] = {
    "FusedAdam": ("adam_", lambda params: FusedAdam(params, weight_decay=0.1)),
    "FusedAdam, Adam and capturable": ("adam_", lambda params: FusedAdam(params, adam_w_mode=False, capturable=True)),
    "FusedSGD": ("sgd_", lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)),
    "FusedSGD, late decay": ("sgd_", lambda params: FusedSGD(params, lr=0.1, weight_decay=0.1, wd_after_momentum=True)),
    "FusedLAMB": ("lamb_", FusedLAMB),
}
CASES = {
    **{f"{name}, {dtype}": (kernel, functools.partial(stepped, make, dtype))
       for name, (kernel, make) in OPTIMIZERS.items() for dtype in (WIDE, HALF)},
    "masters are stepped with their half parameters": ("adam_", stepped_masters),
}  # fmt: skip

if __name__ == "__main__":
    check(*CASES[sys.argv[1]])
