"""The backward of RMS norms of half input, on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp_kernels.library import ArgumentError, NormArgs, call
from autoamp_kernels.lists import CODES, names_of

__all__ = ["rms_norm_backward"]

_HALF = (torch.float16, torch.bfloat16)


def rms_norm_backward(
    grad: Tensor, input: Tensor, rstd: Tensor, weight: Tensor | None = None, *,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of an RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4).

    With ``x = input * rstd`` and ``g = grad * weight`` they are ``rstd * (g - x * mean(g * x))``, with means over a
    row, and the sum over rows of ``grad * x``. All is computed in fp32, with sums of many in fp64. Results are new
    tensors, and take no part in autograd. They do not depend on the number of threads.

    Args:
        grad: The gradient of the result, of any shape; fp32, fp16 or bf16; contiguous.
        input: What was normalised, of the same shape, fp16 or bf16; contiguous.
        rstd: The inverse root of each row's mean square, fp32, one for each row.
        weight: fp32, one element for each column; None for 1.
        wanted: Which of the two gradients are wanted.

    Returns:
        The gradients of the input, in its shape and dtype, and of the weight, fp32, shape ``(columns,)``. None in the
        place of each that is not wanted.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There is no such kernel for this device.
    """
    rows, count = rstd.numel(), input.numel()
    if count % rows if rows else count:
        raise ArgumentError(f"rms_norm_backward: rstd has {rows} elements and input {count}; give one for each row")
    # Without rows the weight alone tells.
    columns = count // rows if rows else 0 if weight is None else weight.numel()
    weight = torch.ones(columns, device=input.device) if weight is None else weight
    for name, tensor, dtypes, elements in (
        ("input", input, _HALF, count), ("grad", grad, (torch.float32, *_HALF), count),
        ("rstd", rstd, (torch.float32,), rows), ("weight", weight, (torch.float32,), columns),
    ):  # fmt: skip
        _check(name, tensor, input.device, dtypes, elements)
    of_input = torch.empty_like(input) if wanted[0] else None
    of_weight = torch.zeros(columns, device=input.device) if wanted[1] else None
    if not count:
        return of_input, of_weight
    # Of sizes alone, so that threads do not change a bit: few enough that some threads have work, and so many that the
    # sums are little beside what is read.
    at_once = max(1, min(max(32, 131072 // columns), -(-rows // 16)))
    args: Any = NormArgs(torch.get_num_threads(), CODES[grad.dtype], CODES[input.dtype], 0, rows, columns, at_once)
    args.grad, args.input, args.rstds, args.weight = (one.data_ptr() for one in (grad, input, rstd, weight))
    args.grad_in = None if of_input is None else of_input.data_ptr()
    if of_weight is not None:
        partial = torch.empty(-(-rows // at_once) * columns)
        args.grad_weight, args.partial = of_weight.data_ptr(), partial.data_ptr()
    call(input.device.type, "rms_norm_backward", args)
    return of_input, of_weight


def _check(name: str, tensor: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...], elements: int) -> None:
    """Raise ArgumentError where the kernel cannot take a tensor."""
    what = f"rms_norm_backward: {name}"
    if tensor.device != device:
        raise ArgumentError(f"{what} is on {tensor.device}; it must be on {device}, as all others")
    if tensor.dtype not in dtypes:
        raise ArgumentError(f"{what} has dtype {tensor.dtype}; it must be {names_of(dtypes)}")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ArgumentError(f"{what} is not contiguous: shape {tuple(tensor.shape)}; give tensor.contiguous()")
    if tensor.numel() != elements:
        raise ArgumentError(f"{what} has {tensor.numel()} elements; it must have {elements}")
