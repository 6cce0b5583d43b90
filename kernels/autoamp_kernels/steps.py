"""What all optimizers' steps share: what their lists are, and arguments that are numbers or lie on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoamp_kernels.abi import F32, NO_DTYPE, Args
from autoamp_kernels.calls import address, fill_grad_scale, new_args
from autoamp_kernels.errors import ArgumentError
from autoamp_kernels.tables import CODES, Role, Table

__all__ = [
    "GRADS",
    "HALVES",
    "PARAMS",
    "STEPS",
    "Tensors",
    "fill_step",
    "split_rate",
    "split_step",
    "started",
    "state",
]

A = TypeVar("A", bound=Args)

Tensors = Sequence[Tensor]

_HALF = (torch.bfloat16, torch.float16)
_ANY = (torch.float32, *_HALF)

PARAMS, GRADS = Role("params", _ANY, written=True), Role("grads", _ANY)
HALVES = Role("halves", _HALF, written=True)
STEPS = Role("steps", written=True, single=True, state=True)


def state(name: str, single: bool = False) -> Role:
    """Return the role of a list of states."""
    return Role(name, written=True, single=single, state=True)


def split_step(step: float | Tensor | Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None, float]:
    """Return a count of steps as a list of tensors, one tensor and a number, of which one is the count."""
    steps = list(step) if isinstance(step, (list, tuple)) else []
    return steps, step if isinstance(step, Tensor) else None, float(step) if isinstance(step, (int, float)) else 0.0


def split_rate(lr: float | Tensor) -> tuple[Tensor | None, float]:
    """Return a learning rate as a tensor and a number, of which one is the rate."""
    return (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)


def started(
    kernel: str, kind: type[A], table: Table, found_inf: Tensor | None, inv_scale: float, grad_scale: Tensor | None,
    grad_factor: Tensor | None, lr_at: Tensor | None, lr: float,
) -> A:  # fmt: skip
    """Return a struct of arguments with all that every step has, and pointers to the lists.

    Raises:
        ArgumentError: A number's tensor is of the wrong kind, or there are half copies of half parameters.
    """
    args: Any = new_args(kernel, kind, table, found_inf, _fill_written)
    if args.half_dtype != NO_DTYPE and args.param_dtype != F32:
        raise ArgumentError(
            f"{kernel}: halves are given, but params are in half precision themselves; give halves=None, or fp32 params"
        )
    grads = table.columns["grads"]
    args.grads, args.grad_dtype = grads.address, grads.dtype
    fill_grad_scale(kernel, args.grad_scale, table, inv_scale, grad_scale, grad_factor)
    args.lr = lr
    if lr_at is not None:
        args.lr_at = address(kernel, "lr", lr_at, table, torch.float32)
    return args  # type: ignore[no-any-return]


def _fill_written(args: Any, table: Table) -> None:
    columns = table.columns
    for name, column in columns.items():
        if column.role is STEPS:
            args.step.each = column.address
        elif column.role.written:
            setattr(args, name, column.address)
    args.param_dtype = columns["params"].dtype
    args.half_dtype = columns["halves"].dtype if "halves" in columns else NO_DTYPE


def fill_step(kernel: str, args: Any, table: Table, number: float, one: Tensor | None, advance: bool) -> None:
    """Set the count of steps in a struct, but for a list of counts, which is there."""
    step = args.step
    step.number, step.advance = number, advance
    if one is not None:
        step.one = address(kernel, "step", one, table, torch.float32, torch.int32, torch.int64)
        step.dtype = CODES[one.dtype]
