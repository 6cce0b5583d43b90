"""Lists of tensors, checked and made to tables of pointers, which serve again as long as the tensors are the same.

All checks are done before anything is launched. Lists that are written are those of an earlier call where all tensors
are the same objects at the same addresses, and of the same sizes, which may change behind the same address. So one
thing goes unnoticed: a parameter whose ``.data`` becomes another view of the same memory, of as many elements, such as
its own transpose; of states of any size. Lists that are read, which are new in each step, are checked in all respects,
by one call where they are like those of an earlier call.
"""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from autoamp_kernels.abi import BF16, CHUNK, F16, F32, I32, I64, Args
from autoamp_kernels.errors import ArgumentError
from autoamp_kernels.library import library
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


Given: TypeAlias = Sequence[tuple[Role, Sequence[Tensor]]]

# By `map`: for hundreds of tensors these calls are most of what a step costs the host.
_address, _count, _is_contiguous = Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous
_dtype = operator.attrgetter("dtype")


@dataclass(slots=True)
class Column:
    """A list of tensors that was checked: their addresses, as a table for the kernel.

    Attributes:
        role: What the list is.
        pointers: Shape ``[tensors]``.
        address: Where ``pointers`` lie.
        sizes: Shape ``[tensors]``, in bytes.
        sizes_address: Where ``sizes`` lie.
        dtype: The code of the tensors' dtype.
        likeness: Of a list that is read, tells whether others are like these.
    """

    role: Role
    pointers: array[int]
    address: int
    sizes: Ints
    sizes_address: int
    dtype: int
    likeness: Likeness


class Written:
    """The lists that a kernel writes to, and their memory, each piece behind the one before.

    Args:
        kernel: The name of the kernel, for messages.
        given: The lists, and others, which are let be.
        columns: Those of the lists that are written.

    Attributes:
        count: How many pieces there are; empty tensors have none.
        begins: Where the first addresses of the pieces lie, int64.
        ends: Where the first addresses behind them lie, int64.

    Raises:
        ArgumentError: Two pieces share memory.
    """

    def __init__(self, kernel: str, given: Given, columns: Sequence[Column]) -> None:
        died: list[Any] = []
        lists = [tensors for role, tensors in given if role.written]
        # As long as all of them live no other tensor has the identity of one.
        self._died, self._references = died, [weakref.ref(one, died.append) for one in itertools.chain(*lists)]
        self._known = [(list(map(id, tensors)), list(map(_address, tensors))) for tensors in lists]
        self._counts = list(map(_count, given[0][1]))
        self._columns = columns
        none = np.zeros(0, np.int64)
        begins = np.concatenate([none, *(column.pointers for column in columns)])
        ends = begins + np.concatenate([none, *(column.sizes for column in columns)])
        order = np.argsort(begins, kind="stable")
        self._order = order = order[ends[order] > begins[order]]
        self._begins, self._ends, self.count = begins[order], ends[order], len(order)
        self.begins, self.ends = int(self._begins.ctypes.data), int(self._ends.ctypes.data)
        bad = np.flatnonzero(self._begins[1:] < self._ends[:-1])
        if len(bad):
            _refuse(kernel, self._name(bad[0]), self._name(bad[0] + 1))

    def are(self, given: Given) -> bool:
        """Tell whether these are the lists again that are written, at the same addresses and of the same sizes."""
        # One list after the other: what is at hand of a tensor is used while it is in the processor's cache.
        lists = [(role, tensors) for role, tensors in given if role.written]
        for (role, tensors), (ids, addresses) in zip(lists, self._known, strict=True):
            if list(map(id, tensors)) != ids or list(map(_address, tensors)) != addresses:
                return False
            # Nobody but the optimizer changes the size of a state.
            if not role.state and list(map(_count, tensors)) != self._counts:
                return False
        return not self._died

    def check_apart(self, kernel: str, column: Column) -> None:
        """Raise ArgumentError where a list that is only read shares memory with what is written."""
        if not self.count:
            return
        bad = library().shared(
            column.address, column.sizes_address, len(column.pointers), self.begins, self.ends, self.count
        )
        if bad >= 0:
            at = np.searchsorted(self._ends, column.pointers[bad], side="right")
            _refuse(kernel, (column.role.name, bad), self._name(at))

    def _name(self, piece: Any) -> tuple[str, int]:
        """Return the argument's name and the index of a piece."""
        column, index = divmod(int(self._order[piece]), len(self._columns[0].pointers))
        return self._columns[column].role.name, index


@dataclass(slots=True)
class Table:
    """Lists of tensors that were checked together.

    Attributes:
        device: Where they all are.
        counts: Shape ``[tensors]``, the number of elements of each.
        first_chunk: Shape ``[tensors + 1]``, how many chunks the tensors before have.
        is_contiguous: Whether all tensors of the first list are.
        columns: By the names of the roles; a list that was not given has none.
        written: What the kernel writes to.
        args: What the struct of arguments has of all that in each call; None as long as nobody has set it.
    """

    device: torch.device
    counts: Ints
    first_chunk: Ints
    is_contiguous: bool
    columns: dict[str, Column]
    written: Written
    args: Args | None = None


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
        count = len(given[0][1])
        for role, tensors in given:
            if len(tensors) != count:
                raise ArgumentError(
                    f"{kernel}: {role.name} has {len(tensors)} tensors and {given[0][0].name} has {count}; give one "
                    "for each, in the same order"
                )
        # Which lists these are. Whether the tensors that are written are all the same is found out later.
        key = kernel, count, *[(role.name, role.written and id(tensors[0])) for role, tensors in given]
        old = self._tables.get(key)
        try:
            table = _again(kernel, given, old) if old is not None and old.written.are(given) else None
            if table is None:
                table = _built(kernel, given, old)
        except RuntimeError:
            # A tensor without an address.
            for role, tensors in given:
                _check_dense(kernel, role, tensors)
            raise
        self._tables[key] = table
        self._tables.move_to_end(key)
        while len(self._tables) > self._kept:
            self._tables.popitem(last=False)
        return table


def _again(kernel: str, given: Given, old: Table) -> Table | None:
    """Return the table of what is written once more, beside other lists to read; None where the first list changed."""
    columns = dict(old.columns)
    for role, tensors in given:
        if role.written:
            continue
        before = columns[role.name]
        if before.likeness.holds(tensors):
            pointers = array("q", list(map(_address, tensors)))
            column = Column(
                role, pointers, pointers.buffer_info()[0], before.sizes, before.sizes_address, before.dtype,
                before.likeness,
            )  # fmt: skip
        elif role is given[0][0]:
            return None
        else:
            column = _column(kernel, role, tensors, given[0], old.device, old.counts, old.is_contiguous, before)
        old.written.check_apart(kernel, column)
        columns[role.name] = column
    return Table(old.device, old.counts, old.first_chunk, old.is_contiguous, columns, old.written, old.args)


def _built(kernel: str, given: Given, old: Table | None) -> Table:
    """Check all lists and make their table."""
    anchors, known = given[0][1], {} if old is None else old.columns
    device, is_contiguous = anchors[0].device, all(map(_is_contiguous, anchors))
    counts = np.array(list(map(_count, anchors)), dtype=np.int64)
    first_chunk = np.concatenate([np.zeros(1, np.int64), np.cumsum((counts + (CHUNK - 1)) // CHUNK)])
    columns = {
        role.name: _column(kernel, role, tensors, given[0], device, counts, is_contiguous, known.get(role.name))
        for role, tensors in given
    }
    written = Written(kernel, given, [columns[role.name] for role, _ in given if role.written])
    for column in columns.values():
        if not column.role.written:
            written.check_apart(kernel, column)
    return Table(device, counts, first_chunk, is_contiguous, columns, written)


def _column(
    kernel: str, role: Role, tensors: Sequence[Tensor], anchor: tuple[Role, Sequence[Tensor]], device: torch.device,
    counts: Ints, is_contiguous: bool, before: Column | None,
) -> Column:  # fmt: skip
    """Check a list beside parameters of so many elements each, and return its column."""
    pointers = array("q", list(map(_address, tensors)))
    if not (is_contiguous and _is_plain(role, tensors, pointers, counts, device)):
        _check(kernel, role, tensors, *anchor, device)
    sizes = (np.ones_like(counts) if role.single else counts) * tensors[0].itemsize
    dtype, likeness = CODES[tensors[0].dtype], Likeness()
    if not role.written and before is not None:
        # Those that are like the ones before will be so again.
        again = before.dtype == dtype and np.array_equal(before.sizes, sizes)
        likeness = before.likeness.learnt(tensors) if again else before.likeness.forgotten()
    return Column(role, pointers, pointers.buffer_info()[0], sizes, int(sizes.ctypes.data), dtype, likeness)


def _is_plain(
    role: Role, tensors: Sequence[Tensor], pointers: Sequence[int], counts: Ints, device: torch.device
) -> bool:
    """Tell whether a list is right without looking closer: what nearly all are, found out in one pass for each rule."""
    dtype = tensors[0].dtype
    if set(map(_dtype, tensors)) != {dtype} or dtype not in role.dtypes or not _all_on(device, tensors, pointers):
        return False
    own = list(map(_count, tensors))
    if role.single:
        return own == [1] * len(tensors)
    return own == counts.tolist() and all(map(_is_contiguous, tensors))


def _all_on(device: torch.device, tensors: Sequence[Tensor], pointers: Sequence[int]) -> bool:
    """Tell whether all tensors are on a device."""
    # Their devices' numbers are faster to get, and tell all but tensors without memory from others.
    if tensors[0].device == device and len(set(map(Tensor.get_device, tensors))) == 1 and 0 not in pointers:
        return True
    return {tensor.device for tensor in tensors} == {device}


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


def _refuse(kernel: str, one: tuple[str, int], other: tuple[str, int]) -> None:
    raise ArgumentError(
        f"{kernel}: {one[0]}[{one[1]}] and {other[0]}[{other[1]}] share memory; what the kernel writes must be shared "
        "with nothing; give each tensor once, or a clone"
    )
