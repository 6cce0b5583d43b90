"""Gradients in one read: scaled or copied, checked for inf and nan, and their norms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from autoamp_kernels.abi import NO_DTYPE, ScaleArgs
from autoamp_kernels.calls import address, by_operator, fill_grad_scale, launch, new_args, tables
from autoamp_kernels.errors import ArgumentError
from autoamp_kernels.operators import define
from autoamp_kernels.tables import Role

__all__ = ["scale_"]

_ANY = (torch.float32, torch.bfloat16, torch.float16)

Tensors = Sequence[Tensor]

_READ, _WRITTEN = (Role("ins", _ANY), Role("outs", _ANY, written=True)), (Role("ins", _ANY, written=True),)


def scale_(
    ins: Tensors, outs: Tensors | None = None, *, inv_scale: float = 1.0, grad_scale: Tensor | None = None,
    grad_factor: Tensor | None = None, found_inf: Tensor | None = None, norms: Tensor | None = None,
    total: Tensor | None = None,
) -> None:  # fmt: skip
    """Multiply tensors, look for inf and nan, and take 2-norms, in one read.

    All of that is of ``ins`` times the factors, in fp32, before it is rounded to the dtype of ``outs``. Norms do not
    depend on the number of threads.

    Args:
        ins: fp32, fp16 or bf16 tensors.
        outs: Where the products go, parallel to ``ins``: the very same list for in place, others for a copy in any of
            these dtypes, None to write none.
        inv_scale: A factor.
        grad_scale: One fp32 element, a divisor; None for 1.
        grad_factor: One fp32 element, a factor; None for 1.
        found_inf: One fp32 element that is set to 1 where an inf or nan is found, and else stays; None for no check.
        norms: fp32, shape ``[len(ins)]``: set to the norm of each; None for none.
        total: One fp32 element: set to the norm of all together; None for none.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There are no kernels for this device.
    """
    if not ins:
        if total is not None:
            total.zero_()
        return
    inplace = outs is ins
    lists = (ins, [] if inplace or outs is None else outs)
    run = _scale_operator if by_operator(lists) else _scale
    if inplace and run is _scale_operator:
        run = _scale_inplace_operator
    run(*lists, grad_scale, grad_factor, found_inf, norms, total, inv_scale, inplace)


def _scale(
    ins: Tensors, outs: Tensors, grad_scale: Tensor | None, grad_factor: Tensor | None, found_inf: Tensor | None,
    norms: Tensor | None, total: Tensor | None, inv_scale: float, inplace: bool,
) -> None:  # fmt: skip
    roles, lists = (_WRITTEN, (ins,)) if inplace else (_READ, (ins, outs or None))
    table = tables.table("scale", roles, lists)
    args = new_args("scale", ScaleArgs, table, None)
    args.grad_scale = fill_grad_scale("scale", table, inv_scale, grad_scale, grad_factor)
    args.found = address("scale", "found_inf", found_inf, table, torch.float32)
    args.total = address("scale", "total", total, table, torch.float32)
    args.norms = _norms_address(norms, len(ins), table.device)
    # Kept until the launch is done; its size is that of the chunks, not of the tensors.
    partial = np.empty(int(table.first_chunk[-1]) + 1, dtype=np.float64)
    if norms is not None or total is not None:
        args.partial = partial.ctypes.data
    column = table.columns["ins"]
    args.ins, args.in_dtype = column.address, column.dtype
    target = column if inplace else table.columns.get("outs")
    args.outs = None if target is None else target.address
    args.out_dtype = NO_DTYPE if target is None else target.dtype
    single = [tensor for tensor in (found_inf, norms, total) if tensor is not None]
    launch("scale", args, table, (ins if inplace else outs, single))


def _norms_address(norms: Tensor | None, count: int, device: torch.device) -> int | None:
    if norms is None:
        return None
    if (
        norms.dtype is not torch.float32
        or norms.shape != (count,)
        or norms.device != device
        or not norms.is_contiguous()
    ):
        raise ArgumentError(
            f"scale: norms has dtype {norms.dtype}, shape {tuple(norms.shape)}, on {norms.device}; it must be a "
            f"contiguous float32 tensor of shape ({count},) on {device}"
        )
    return norms.data_ptr()


_REST = (
    "Tensor? grad_scale, Tensor? grad_factor, Tensor(c!)? found_inf, Tensor(d!)? norms, Tensor(e!)? total, "
    "float inv_scale, bool inplace) -> ()"
)
_scale_operator = define(f"scale_(Tensor[] ins, Tensor(b!)[] outs, {_REST}", _scale)
_scale_inplace_operator = define(f"scale_inplace_(Tensor(a!)[] ins, Tensor[] outs, {_REST}", _scale)
