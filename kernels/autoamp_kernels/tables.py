"""Lists of tensors, checked and made to tables of pointers, which serve again as long as the tensors are the same.

All checks are done before anything is launched. What is checked at every call is what can change behind the same
address: the size, and of lists that are read the dtype and whether the elements lie in order. Lists that are written
are those of an earlier call where all tensors are the same objects at the same addresses. So one thing goes unnoticed:
a parameter whose ``.data`` becomes another view of the same memory, of as many elements, such as its own transpose; of
states of any size.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from autoamp_kernels.abi import BF16, CHUNK, F16, F32, I32, I64
from autoamp_kernels.errors import ArgumentError
from autoamp_kernels.likeness import Likeness

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


# What tells whether a list is that of an earlier call, cheap enough to ask at every call: addresses, counts of
# elements, and what else can change. Of lists that are written, which hardly ever change, it is which tensors they are;
# of states, whose layout is nobody else's, without the counts. Of those that are read it is dtypes, and True where all
# tensors are contiguous, else their shapes and strides.
Layout: TypeAlias = tuple[list[int], list[int] | None, Any, Any]

_address, _count, _is_contiguous = Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous


def _layout(role: Role, tensors: Sequence[Tensor], old: Column | None) -> Layout:
    # By `map`: for hundreds of tensors these calls are most of what a step costs the host.
    pointers = list(map(_address, tensors))
    if role.written:
        return pointers, None if role.state else list(map(_count, tensors)), list(map(id, tensors)), None
    if old is not None and old.likeness.holds(tensors):
        return pointers, *old.layout[1:]
    return pointers, list(map(_count, tensors)), [tensor.dtype for tensor in tensors], _order(tensors)


def _order(tensors: Sequence[Tensor]) -> Any:
    return all(map(_is_contiguous, tensors)) or [(tensor.shape, tensor.stride()) for tensor in tensors]


class _Watch:
    """Tells whether tensors still live, so that no other can have the identity of one of them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        died: list[Any] = []
        self._died, self._references = died, [weakref.ref(tensor, died.append) for tensor in tensors]

    def holds(self) -> bool:
        return not self._died


@dataclass(frozen=True)
class Column:
    """A list of tensors that was checked: their addresses, as a table for the kernel.

    Attributes:
        role: What the list is.
        layout: What tells whether it is the same list.
        pointers: Shape ``[tensors]``.
        sizes: Shape ``[tensors]``, in bytes.
        address: Where ``pointers`` lie.
        dtype: The code of the tensors' dtype.
        watch: Where the layout has identities, whose they are.
        likeness: Of a list that is read, tells whether others are like these.
    """

    role: Role
    layout: Layout
    pointers: Ints
    sizes: Ints
    address: int
    dtype: int
    watch: _Watch | None
    likeness: Likeness

    def is_that(self, layout: Layout) -> bool:
        """Tell whether a list of this layout is the column's."""
        return self.layout == layout and (self.watch is None or self.watch.holds())


def _column(role: Role, tensors: Sequence[Tensor], layout: Layout, counts: Ints, old: Column | None) -> Column:
    """Return the column of a list that was checked beside parameters of so many elements each."""
    pointers, first = np.array(layout[0], dtype=np.int64), tensors[0]
    address, likeness = int(pointers.ctypes.data), Likeness() if old is None else old.likeness
    if not role.written and old is not None and old.layout[1:] == layout[1:]:
        if layout[2] is not old.layout[2]:
            # They are like the ones before, and so will be the next.
            likeness.learn(tensors)
        return Column(role, layout, pointers, old.sizes, address, old.dtype, None, likeness)
    likeness.forget()
    sizes = (np.ones_like(counts) if role.single else counts) * first.itemsize
    watch = _Watch(tensors) if role.written else None
    return Column(role, layout, pointers, sizes, address, CODES[first.dtype], watch, likeness)


@dataclass(frozen=True)
class Written:
    """The memory that a kernel writes to, each piece behind the one before.

    Attributes:
        columns: Whose pieces these are.
        begins: Shape ``[pieces]``, the first address of each.
        ends: Shape ``[pieces]``, the first address behind each.
        order: Shape ``[pieces]``, which piece it is, counted through all columns.
    """

    columns: list[Column]
    begins: Ints
    ends: Ints
    order: Ints

    def name(self, piece: int) -> tuple[str, int]:
        """Return the argument's name and the index of a piece."""
        column, index = divmod(int(self.order[piece]), len(self.columns[0].pointers))
        return self.columns[column].role.name, index


@dataclass(frozen=True)
class Table:
    """Lists of tensors that were checked together.

    Attributes:
        device: Where they all are.
        counts: Shape ``[tensors]``, the number of elements of each.
        first_chunk: Shape ``[tensors + 1]``, how many chunks the tensors before have.
        is_contiguous: Whether all tensors of the first list are.
        columns: By the names of the roles; a list that was not given has none.
        written: What the kernel writes to.
    """

    device: torch.device
    counts: Ints
    first_chunk: Ints
    is_contiguous: bool
    columns: dict[str, Column]
    written: Written


Given: TypeAlias = Sequence[tuple[Role, Sequence[Tensor]]]


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
        before = {} if old is None else old.columns
        try:
            layouts = [_layout(role, tensors, before.get(role.name)) for role, tensors in given]
        except RuntimeError:
            # A tensor without an address.
            for role, tensors in given:
                _check_dense(kernel, role, tensors)
            raise
        if old is not None and len(old.columns) == len(given):
            columns = (old.columns.get(role.name) for role, _ in given)
            if all(map(_is_that, columns, layouts)):
                return old
        table = _built(kernel, given, layouts, old)
        self._tables[key] = table
        self._tables.move_to_end(key)
        while len(self._tables) > self._kept:
            self._tables.popitem(last=False)
        return table


def _is_that(column: Column | None, layout: Layout) -> bool:
    return column is not None and column.is_that(layout)


def _built(kernel: str, given: Given, layouts: Sequence[Layout], old: Table | None) -> Table:
    """Check the lists and make their table; what is as in the old table is taken from there, unchecked."""
    anchor, device = given[0], given[0][1][0].device
    known: dict[str, Column] = {}
    if old is not None and old.device == device and _is_measure(old.columns.get(anchor[0].name), layouts[0]):
        known = old.columns
        counts, first_chunk, is_contiguous = old.counts, old.first_chunk, old.is_contiguous
    else:
        counts, is_contiguous = np.array(layouts[0][1], dtype=np.int64), _order(anchor[1]) is True
        first_chunk = np.concatenate([np.zeros(1, np.int64), np.cumsum((counts + (CHUNK - 1)) // CHUNK)])
    columns = {}
    for (role, tensors), layout in zip(given, layouts, strict=True):
        column = known.get(role.name)
        if column is None or not column.is_that(layout):
            alike = column is not None and layout[2] is column.layout[2]
            if not alike and not (is_contiguous and _is_plain(role, tensors, layout, layouts[0][1], device)):
                _check(kernel, role, tensors, anchor[0], anchor[1], device)
            column = _column(role, tensors, layout, counts, column)
        columns[role.name] = column
    written = [column for column in columns.values() if column.role.written]
    if old is not None and len(old.written.columns) == len(written) and all(map(_same, old.written.columns, written)):
        pieces = old.written
    else:
        pieces = _pieces(kernel, written)
    for column in columns.values():
        if not column.role.written:
            _check_read(kernel, column, pieces)
    return Table(device, counts, first_chunk, is_contiguous, columns, pieces)


def _is_measure(column: Column | None, layout: Layout) -> bool:
    """Tell whether what was right beside a column is so beside a list of this layout."""
    if column is None:
        return False
    # What is read may lie elsewhere.
    return column.is_that(layout) if column.role.written else column.layout[1:] == layout[1:]


def _same(one: Column, other: Column) -> bool:
    return one is other


def _is_plain(role: Role, tensors: Sequence[Tensor], layout: Layout, counts: Any, device: torch.device) -> bool:
    """Tell whether a list is right without looking closer: what nearly all are, found out in one pass for each rule."""
    is_read = not (role.state or role.written)
    dtypes = set(layout[2]) if is_read else {tensor.dtype for tensor in tensors}
    dtype = tensors[0].dtype
    if dtypes != {dtype} or dtype not in role.dtypes or not _all_on(device, tensors, layout[0]):
        return False
    own = layout[1] if layout[1] is not None else list(map(_count, tensors))
    if role.single:
        return own == [1] * len(tensors)
    return (layout[3] if is_read else _order(tensors)) is True and own == counts


def _all_on(device: torch.device, tensors: Sequence[Tensor], pointers: list[int]) -> bool:
    """Tell whether all tensors are on a device."""
    # Their devices' numbers are faster to get, and tell all but tensors without memory from others.
    if tensors[0].device == device and len(set(map(Tensor.get_device, tensors))) == 1 and 0 not in pointers:
        return True
    return {tensor.device for tensor in tensors} == {device}


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


def _pieces(kernel: str, written: list[Column]) -> Written:
    """Return what is written, in order; ArgumentError where two pieces share memory."""
    begins = np.concatenate([np.zeros(0, np.int64), *(column.pointers for column in written)])
    ends = begins + np.concatenate([np.zeros(0, np.int64), *(column.sizes for column in written)])
    order = np.argsort(begins, kind="stable")
    order = order[ends[order] > begins[order]]
    pieces = Written(written, begins[order], ends[order], order)
    bad = np.flatnonzero(pieces.begins[1:] < pieces.ends[:-1])
    if len(bad):
        _refuse(kernel, pieces.name(bad[0]), pieces.name(bad[0] + 1))
    return pieces


def _check_read(kernel: str, column: Column, written: Written) -> None:
    """Raise ArgumentError where a list that is only read shares memory with what is written."""
    if not len(written.begins):
        return
    ends = column.pointers + column.sizes
    # The first written piece that ends behind the start of what is read.
    at = np.searchsorted(written.ends, column.pointers, side="right")
    inside = np.flatnonzero((at < len(written.begins)) & (ends > column.pointers))
    bad = inside[written.begins[at[inside]] < ends[inside]]
    if len(bad):
        _refuse(kernel, (column.role.name, int(bad[0])), written.name(at[bad[0]]))


def _refuse(kernel: str, one: tuple[str, int], other: tuple[str, int]) -> None:
    raise ArgumentError(
        f"{kernel}: {one[0]}[{one[1]}] and {other[0]}[{other[1]}] share memory; what the kernel writes must be shared "
        "with nothing; give each tensor once, or a clone"
    )
