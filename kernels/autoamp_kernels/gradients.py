"""Gradients in one read: scaled or copied, added, checked for inf and nan, and their norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoamp_kernels.abi import CHECK_X, CHECK_Y, MAX_NORM, NO_DTYPE, AxpbyArgs, ScaleArgs
from autoamp_kernels.calls import address, by_operator, fill_grad_scale, launch, new_args, sums, tables
from autoamp_kernels.errors import ArgumentError
from autoamp_kernels.operators import define
from autoamp_kernels.tables import Role, Table

__all__ = ["axpby_", "scale_"]

_ANY = (torch.float32, torch.bfloat16, torch.float16)

Tensors = Sequence[Tensor]

_READ, _WRITTEN = (Role("ins", _ANY), Role("outs", _ANY, written=True)), (Role("ins", _ANY, written=True),)


def scale_(
    ins: Tensors, outs: Tensors | None = None, *, inv_scale: float = 1.0, grad_scale: Tensor | None = None,
    grad_factor: Tensor | None = None, found_inf: Tensor | None = None, norms: Tensor | None = None,
    total: Tensor | None = None, max_norms: bool = False,
) -> None:  # fmt: skip
    """Multiply tensors, look for inf and nan, and take norms, in one read. With no factor and no norms it is a copy.

    Inf and nan are looked for in ``ins``, as `torch.amp.GradScaler` does: what overflows only by the factors, or by
    rounding to the dtype of ``outs``, is not found. Norms are those of ``ins`` times the factors, in fp32 before it is
    rounded. They do not depend on the number of threads.

    Args:
        ins: fp32, fp16 or bf16 tensors.
        outs: Where the products go, parallel to ``ins``: the very same list for in place, others for a copy in any of
            these dtypes, None to write none.
        inv_scale: A factor.
        grad_scale: One fp32 element, a divisor; None for 1.
        grad_factor: One fp32 element, a factor; None for 1.
        found_inf: One fp32 element that is set to 1 where an inf or nan is found, and else stays; None for no check.
        norms: fp32, shape ``[len(ins)]``: set to the norm of each, 0 for an empty one; None for none.
        total: One fp32 element: set to the norm of all together; None for none.
        max_norms: Whether norms are the largest absolute values. If not, they are 2-norms.

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
    run(*lists, grad_scale, grad_factor, found_inf, norms, total, inv_scale, inplace, max_norms)


def _scale(
    ins: Tensors, outs: Tensors, grad_scale: Tensor | None, grad_factor: Tensor | None, found_inf: Tensor | None,
    norms: Tensor | None, total: Tensor | None, inv_scale: float, inplace: bool, max_norms: bool,
) -> None:  # fmt: skip
    roles, lists = (_WRITTEN, (ins,)) if inplace else (_READ, (ins, outs or None))
    table = tables.table("scale", roles, lists)
    args = new_args("scale", ScaleArgs, table, None, _fill_scale)
    fill_grad_scale("scale", args.grad_scale, table, inv_scale, grad_scale, grad_factor)
    args.found = address("scale", "found_inf", found_inf, table, torch.float32)
    args.total = address("scale", "total", total, table, torch.float32)
    args.norms = _norms_address(norms, len(ins), table.device)
    args.flags = MAX_NORM * max_norms
    if norms is not None or total is not None:
        partial = sums(table)
        args.partial = partial.data_ptr()
    column = table.columns["ins"]
    args.ins, args.in_dtype = column.address, column.dtype
    single = [tensor for tensor in (found_inf, norms, total) if tensor is not None]
    launch("scale", args, table.device, (ins if inplace else outs, single))


def _fill_scale(args: ScaleArgs, table: Table) -> None:
    ins = table.columns["ins"]
    target = ins if ins.role.written else table.columns.get("outs")
    args.outs = None if target is None else target.address
    args.out_dtype = NO_DTYPE if target is None else target.dtype


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
    "float inv_scale, bool inplace, bool max_norms) -> ()"
)
_scale_operator = define(f"scale_(Tensor[] ins, Tensor(b!)[] outs, {_REST}", _scale)
_scale_inplace_operator = define(f"scale_inplace_(Tensor(a!)[] ins, Tensor[] outs, {_REST}", _scale)


_SUMMANDS = (Role("xs", _ANY), Role("ys", _ANY))
_AXPBY = (*_SUMMANDS, Role("outs", _ANY, written=True))
_AXPBY_INPLACE = (_SUMMANDS[0], Role("ys", _ANY, written=True))


def axpby_(
    a: float, xs: Tensors, b: float, ys: Tensors, outs: Tensors | None = None, *, grad_scale: Tensor | None = None,
    grad_factor: Tensor | None = None, found_inf: Tensor | None = None, check_xs: bool = True, check_ys: bool = True,
) -> None:  # fmt: skip
    """Set ``outs = a * xs + b * ys``, computed in fp32 and rounded once, and look for inf and nan in what is read.

    Args:
        a: A factor of ``xs``.
        xs: fp32, fp16 or bf16 tensors.
        b: The factor of ``ys``.
        ys: fp32, fp16 or bf16 tensors, parallel to ``xs``.
        outs: Where the sums go, fp32, fp16 or bf16; None for in place, in ``ys``.
        grad_scale: One fp32 element by which ``xs`` are divided; None for 1.
        grad_factor: One fp32 element by which ``xs`` are multiplied; None for 1.
        found_inf: One fp32 element that is set to 1 where an inf or nan is found, and else stays; None for no check.
        check_xs: Whether ``xs`` are checked.
        check_ys: Whether ``ys`` are checked.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There are no kernels for this device.
    """
    if not xs:
        return
    inplace = outs is None or outs is ys
    lists = (xs, ys, [] if inplace or outs is None else outs)
    run = _axpby
    if by_operator(lists):
        run = _axpby_inplace_operator if inplace else _axpby_operator
    run(*lists, grad_scale, grad_factor, found_inf, a, b, check_xs, check_ys)


def _axpby(
    xs: Tensors, ys: Tensors, outs: Tensors, grad_scale: Tensor | None, grad_factor: Tensor | None,
    found_inf: Tensor | None, a: float, b: float, check_xs: bool, check_ys: bool,
) -> None:  # fmt: skip
    roles, lists = (_AXPBY, (xs, ys, outs)) if outs else (_AXPBY_INPLACE, (xs, ys))
    table = tables.table("axpby", roles, lists)
    args = new_args("axpby", AxpbyArgs, table, None, _fill_axpby)
    fill_grad_scale("axpby", args.x_scale, table, a, grad_scale, grad_factor)
    args.found = address("axpby", "found_inf", found_inf, table, torch.float32)
    args.b, args.flags = b, CHECK_X * check_xs | CHECK_Y * check_ys
    x, y = table.columns["xs"], table.columns["ys"]
    args.xs, args.ys, args.x_dtype, args.y_dtype = x.address, y.address, x.dtype, y.dtype
    launch("axpby", args, table.device, (outs or ys, [] if found_inf is None else [found_inf]))


def _fill_axpby(args: AxpbyArgs, table: Table) -> None:
    target = table.columns.get("outs") or table.columns["ys"]
    args.outs, args.out_dtype = target.address, target.dtype


_AXPBY_REST = (
    "Tensor? grad_scale, Tensor? grad_factor, Tensor(c!)? found_inf, float a, float b, bool check_xs, bool check_ys) "
    "-> ()"
)
_axpby_operator = define(f"axpby_(Tensor[] xs, Tensor[] ys, Tensor(b!)[] outs, {_AXPBY_REST}", _axpby)
_axpby_inplace_operator = define(f"axpby_inplace_(Tensor[] xs, Tensor(a!)[] ys, Tensor[] outs, {_AXPBY_REST}", _axpby)
