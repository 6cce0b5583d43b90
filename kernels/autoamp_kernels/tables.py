"""Lists of tensors, checked and made to tables of pointers, which serve again as long as the tensors are the same.

All checks are done before anything is launched. What is checked at every call is what can change behind the same
address: the size, the dtype, and whether the elements lie in order.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from autoamp_kernels.abi import BF16, CHUNK, F16, F32, I32, I64
from autoamp_kernels.errors import ArgumentError

__all__ = ["CODES", "Column", "Role", "Table", "Tables"]

CODES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16, torch.int32: I32, torch.int64: I64}

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True)
class Role:
    """What a list of tensors is to a kernel.

    Attributes:
        name: The name of the argument.
        dtypes: What the tensors may be, all of them alike.
        written: Whether the kernel writes to them.
        single: Whether each has one element, not the number of its parameter.
        state: Whether an optimizer made them, so that nobody else changes their layout.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    written: bool = False
    single: bool = False
    state: bool = False


def _layout(role: Role, tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Return what tells whether tensors are those of an earlier call, cheap enough to ask at every call."""
    pointers, sizes = [t.data_ptr() for t in tensors], [t.nbytes for t in tensors]
    if role.state:
        return pointers, sizes, [tensors[0].dtype]
    return pointers, sizes, [t.dtype for t in tensors], [t.is_contiguous() for t in tensors]


@dataclass(frozen=True)
class Column:
    """A list of tensors that was checked: their addresses, as a table for the kernel."""

    role: Role
    layout: tuple[list[Any], ...]
    pointers: Ints
    dtype: int

    @property
    def address(self) -> int:
        """Where the table of pointers lies."""
        return int(self.pointers.ctypes.data)


@dataclass(frozen=True)
class Table:
    """Lists of tensors that were checked together.

    Attributes:
        device: Where they all are.
        counts: Shape ``[tensors]``, the number of elements of each.
        first_chunk: Shape ``[tensors + 1]``, how many chunks the tensors before have.
        columns: By the names of the roles; a list that was not given has none.
    """

    device: torch.device
    counts: Ints
    first_chunk: Ints
    columns: dict[str, Column]


class Tables:
    """Tables of the last calls.

    Args:
        kept: How many are kept.
    """

    def __init__(self, kept: int = 64) -> None:
        self._kept = kept
        self._tables: OrderedDict[Any, Table] = OrderedDict()

    def clear(self) -> None:
        """Forget all tables."""
        self._tables.clear()

    def table(self, kernel: str, roles: Sequence[Role], lists: Sequence[Sequence[Tensor] | None]) -> Table:
        """Return the table of a call.

        Args:
            kernel: The name of the kernel, for messages.
            roles: What the lists are. The first is that of the parameters, by which all others are measured.
            lists: Parallel to ``roles``; None for a list that is not given. The first is not empty.

        Raises:
            ArgumentError: A tensor that the kernel cannot take. The message names it, the rule and a remedy.
        """
        given = [(role, tensors) for role, tensors in zip(roles, lists, strict=True) if tensors is not None]
        for role, tensors in given:
            _check_length(kernel, role, tensors, given[0])
        # A rough key: whether the table is that of these very tensors is found out by comparing layouts.
        key = (kernel, *(id(tensors[0]) for role, tensors in given if role.written))
        old = self._tables.get(key)
        try:
            layouts = [_layout(role, tensors) for role, tensors in given]
        except RuntimeError:
            # A tensor without an address.
            for role, tensors in given:
                _check_dense(kernel, role, tensors)
            raise
        if old is not None and [(name, column.layout) for name, column in old.columns.items()] == [
            (role.name, layout) for (role, _), layout in zip(given, layouts, strict=True)
        ]:
            return old
        table = _built(kernel, given, layouts, old)
        self._tables[key] = table
        self._tables.move_to_end(key)
        while len(self._tables) > self._kept:
            self._tables.popitem(last=False)
        return table


def _built(
    kernel: str, given: Sequence[tuple[Role, Sequence[Tensor]]], layouts: Sequence[tuple[list[Any], ...]],
    old: Table | None,
) -> Table:  # fmt: skip
    """Check all lists and make their table; what is as in the old table is taken from there."""
    anchor_role, anchors = given[0]
    kept = {}
    if old is not None and (first := old.columns.get(anchor_role.name)) and first.layout == layouts[0]:
        kept = {
            role.name: column
            for (role, _), layout in zip(given, layouts, strict=True)
            if (column := old.columns.get(role.name)) and column.layout == layout
        }
    device = anchors[0].device
    if old is not None and anchor_role.name in kept and old.device == device:
        counts, first_chunk = old.counts, old.first_chunk
    else:
        kept = {}
        counts = np.array([tensor.numel() for tensor in anchors], dtype=np.int64)
        first_chunk = np.concatenate([np.zeros(1, np.int64), np.cumsum((counts + (CHUNK - 1)) // CHUNK)])
    columns = {}
    for (role, tensors), layout in zip(given, layouts, strict=True):
        if role.name not in kept:
            _check(kernel, role, tensors, anchor_role, anchors, device)
            code = CODES[tensors[0].dtype]
            kept[role.name] = Column(role, layout, np.array(layout[0], dtype=np.int64), code)
        columns[role.name] = kept[role.name]
    _check_overlap(kernel, columns)
    return Table(device, counts, first_chunk, columns)


def _check_length(
    kernel: str, role: Role, tensors: Sequence[Tensor], first: tuple[Role, Sequence[Tensor]]
) -> None:  # fmt: skip
    if len(tensors) != len(first[1]):
        raise ArgumentError(
            f"{kernel}: {role.name} has {len(tensors)} tensors and {first[0].name} has {len(first[1])}; "
            "give one for each, in the same order"
        )


def _check_dense(kernel: str, role: Role, tensors: Sequence[Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            raise ArgumentError(f"{kernel}: {role.name}[{index}] has the layout {tensor.layout}; give a dense tensor")


def _check(
    kernel: str, role: Role, tensors: Sequence[Tensor], anchor_role: Role, anchors: Sequence[Tensor],
    device: torch.device,
) -> None:  # fmt: skip
    """Raise ArgumentError at the first tensor of a list that the kernel cannot take."""
    dtype = tensors[0].dtype
    for index, (tensor, anchor) in enumerate(zip(tensors, anchors, strict=True)):
        what = f"{kernel}: {role.name}[{index}]"
        if tensor.device != device:
            raise ArgumentError(
                f"{what} is on {tensor.device} and {anchor_role.name}[0] on {device}; make a call for each device"
            )
        if tensor.dtype not in role.dtypes:
            allowed = " or ".join(str(one).removeprefix("torch.") for one in role.dtypes)
            raise ArgumentError(f"{what} has dtype {tensor.dtype}; it must be {allowed}")
        if tensor.dtype is not dtype:
            raise ArgumentError(
                f"{what} has dtype {tensor.dtype} and {role.name}[0] {dtype}; make a call for each dtype"
            )
        wanted = 1 if role.single else anchor.numel()
        if tensor.numel() != wanted:
            raise ArgumentError(
                f"{what} has {tensor.numel()} elements; it must have {wanted}"
                + ("" if role.single else f", as {anchor_role.name}[{index}]")
            )
        if not role.single and not _in_order(tensor, anchor):
            raise ArgumentError(
                f"{what} is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}; its elements must "
                f"lie without gaps, in the order of {anchor_role.name}[{index}]; give tensor.contiguous()"
            )


def _in_order(tensor: Tensor, anchor: Tensor) -> bool:
    """Tell whether a tensor's elements fill its memory, in the same order as those of its parameter."""
    if tensor.is_contiguous() and anchor.is_contiguous():
        return True
    if tensor.shape != anchor.shape:
        return False
    # Of a dimension of one element the stride says nothing.
    strides = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    others = [(stride, size) for stride, size in zip(anchor.stride(), anchor.shape, strict=True) if size != 1]
    filled = 1
    for stride, size in sorted(strides):
        if stride != filled:
            return tensor.numel() == 0
        filled *= size
    return strides == others and filled == math.prod(tensor.shape)


def _check_overlap(kernel: str, columns: dict[str, Column]) -> None:
    """Raise ArgumentError where memory that is written is anybody else's too."""
    starts, ends, names = [], [], []
    for written in (True, False):
        chosen = [column for column in columns.values() if column.role.written is written]
        begin = [column.pointers for column in chosen]
        size = [np.array(column.layout[1], dtype=np.int64) for column in chosen]
        starts.append(np.concatenate(begin) if begin else np.zeros(0, np.int64))
        ends.append(starts[-1] + (np.concatenate(size) if size else 0))
        names.append([(column.role.name, i) for column in chosen for i in range(len(column.pointers))])
    order = np.argsort(starts[0], kind="stable")
    order = order[ends[0][order] > starts[0][order]]
    begin_w, end_w = starts[0][order], ends[0][order]
    bad = np.flatnonzero(begin_w[1:] < end_w[:-1])
    if len(bad):
        _refuse(kernel, names[0][order[bad[0]]], names[0][order[bad[0] + 1]])
    if len(begin_w) and len(starts[1]):
        # The first written piece that ends behind the start of what is read.
        at = np.searchsorted(end_w, starts[1], side="right")
        inside = np.flatnonzero((at < len(begin_w)) & (ends[1] > starts[1]))
        bad = inside[begin_w[at[inside]] < ends[1][inside]]
        if len(bad):
            _refuse(kernel, names[1][bad[0]], names[0][order[at[bad[0]]]])


def _refuse(kernel: str, one: tuple[str, int], other: tuple[str, int]) -> None:
    raise ArgumentError(
        f"{kernel}: {one[0]}[{one[1]}] and {other[0]}[{other[1]}] share memory; what the kernel writes must be shared "
        "with nothing; give each tensor once, or a clone"
    )
