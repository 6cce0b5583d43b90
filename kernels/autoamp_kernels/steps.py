"""What all optimizers' steps share: what their lists are, and arguments that are numbers or lie on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from autoamp_kernels.abi import F32, NO_DTYPE, Args, Step
from autoamp_kernels.calls import address, fill_grad_scale, new_args
from autoamp_kernels.errors import ArgumentError
from autoamp_kernels.tables import CODES, Role, Table

__all__ = [
    "GRADS",
    "HALVES",
    "PARAMS",
    "STEPS",
    "Tensors",
    "fill_lists",
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
    """Return a struct of arguments with all that every step has.

    Raises:
        ArgumentError: A number's tensor is of the wrong kind, or there are half copies of half parameters.
    """
    params, halves = table.columns["params"], table.columns.get("halves")
    if halves is not None and params.dtype != F32:
        raise ArgumentError(
            f"{kernel}: halves are given, but params are in half precision themselves; give halves=None, or fp32 params"
        )
    args = new_args(kernel, kind, table, found_inf)
    args.grad_scale = fill_grad_scale(kernel, table, inv_scale, grad_scale, grad_factor)
    args.lr_at, args.lr = address(kernel, "lr", lr_at, table, torch.float32), lr
    return args


def fill_lists(args: Args, table: Table, *names: str) -> None:
    """Set a struct's pointers to the lists of these names, where they were given, and the dtypes of an optimizer's."""
    for name in names:
        column = table.columns.get(name)
        if column is not None:
            setattr(args, name, column.address)
    for field, name in (("grad_dtype", "grads"), ("param_dtype", "params"), ("half_dtype", "halves")):
        column = table.columns.get(name)
        setattr(args, field, NO_DTYPE if column is None else column.dtype)


def fill_step(kernel: str, table: Table, number: float, one: Tensor | None, advance: bool) -> Step:
    """Return the count of steps, as the kernel takes it."""
    each = table.columns.get("steps")
    return Step(
        number=number,
        one=address(kernel, "step", one, table, torch.float32, torch.int32, torch.int64),
        each=None if each is None else each.address,
        dtype=0 if one is None else CODES[one.dtype],
        advance=advance,
    )
