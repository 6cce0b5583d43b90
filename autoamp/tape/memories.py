"""The memories of the tensors of a step: which of them the tape knows, and which values came from outside of it."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoamp.tape.contents import Load, Ref, Tape, ref_to
from autoamp.tensors import version_of
from autoamp.torch_private import undisturbed


class NotOnTape(Exception):
    """An operator cannot be recorded. The message says why."""


class Full(NotOnTape):
    """The tape holds as much as it may."""


class NoValues(Exception):
    """A tensor is on the meta device, where nothing is computed."""


class Memories:
    """The memories of a tape, and what is known of their values.

    Args:
        tape: Where values from outside go.
        limit: How many bytes it may hold.
    """

    def __init__(self, tape: Tape, limit: float) -> None:
        self._tape = tape
        self._limit = limit
        self._numbers = tape.memories
        self._versions: list[int] = []
        # The values that are not copied, by memory.
        self._loads: dict[int, list[Load]] = {}
        # Their values were written by what the tape cannot run again.
        self._unknown: set[int] = set()
        self._made: set[int] = set()

    def read(self, tensor: Tensor) -> Ref:
        """Return the `Ref` of an argument. A value that no operator made is loaded."""
        if tensor.is_conj() or tensor.is_neg():
            raise NotOnTape("a tensor is conjugated or negated lazily")
        if tensor.is_meta:
            raise NoValues
        number, is_new = self._number(tensor)
        if is_new or number in self._unknown or (version_of(tensor) or 0) > self._versions[number]:
            self._load(number, tensor)
        return ref_to(number, tensor)

    def made(self, tensor: Tensor, *, is_recorded: bool, is_write: bool = False) -> Ref:
        """Return the `Ref` of a result, or of an argument that was written to."""
        number, is_new = self._number(tensor)
        if is_new:
            self._made.add(number)
        # torch counts a write once the operator has returned to autograd.
        self._versions[number] = max(self._versions[number], (version_of(tensor) or 0) + is_write)
        if is_recorded:
            self._unknown.add(number)
        return ref_to(number, tensor)

    def keep(self, number: int) -> None:
        """Keep the values that a memory was loaded with: an operator is about to write to it."""
        if loads := self._loads.pop(number, []):
            with undisturbed():
                copied = loads[0].origin.clone()
            for load in loads:
                load.storage, load.owner = copied, None
            self._grow(copied.nbytes())

    def _number(self, tensor: Tensor) -> tuple[int, bool]:
        """Return the number of a tensor's memory, and whether it is new."""
        kind = type(tensor)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise NotOnTape(f"a tensor is a {kind.__name__}")
        # A storage that is referred to weakly keeps its address to itself, so that no other one has it later.
        storage = StorageWeakRef(tensor.untyped_storage())
        number = self._numbers.setdefault(storage, len(self._versions))
        is_new = number == len(self._versions)
        if is_new:
            self._versions.append(version_of(tensor) or 0)
        return number, is_new

    def _load(self, number: int, tensor: Tensor) -> None:
        loads = self._loads.setdefault(number, [])
        if any(load.owner is None or load.is_stale for load in loads):
            raise NotOnTape("a tensor was written to, and no operator of this thread did that")
        is_made, storage, version = number in self._made, tensor.untyped_storage(), version_of(tensor)
        # A tensor with a graph would keep that alive.
        owner = tensor if tensor.grad_fn is None else None
        loads.append(Load(number, tensor.dtype, storage, storage, owner, version, is_made))
        self._tape.events.append(loads[-1])
        self._unknown.discard(number)
        self._versions[number] = max(self._versions[number], version or 0)
        if is_made:
            self._grow(storage.nbytes())

    def _grow(self, size: int) -> None:
        self._tape.nbytes += size
        if self._tape.nbytes > self._limit:
            raise Full(f"the tape would hold more than {self._limit / 2**20:g} MiB")
