"""Runs a tape again, on copies: no code of the program, no module, hook, random state or collective is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp.tensors import HALF_DTYPES, iter_tensors
from autoamp.tools.tape.contents import Load, Op, Ref, Seed, Tape, iter_refs, writes_of
from autoamp.torch_private import undisturbed

Choice = Callable[[Op], bool]
"""Which operators of a tape run in fp32."""


class CannotRerun(Exception):
    """A tape cannot run again. The message says why."""


def everything(op: Op) -> bool:
    """Choose every operator for fp32."""
    return True


@dataclass(eq=False, slots=True)
class _Cell:
    """The value of a memory.

    Attributes:
        storage: The value.
        recorded: The dtype of its elements on the tape.
        dtype: That of its elements here: fp32 where ``recorded`` is a half dtype and the value was computed in fp32.
        is_borrowed: Whether the storage is the tape's, which must not change.
        exact: A result of another size than on the tape, as a workspace has in fp32, and the `Ref` that stands for it.
        start: As for `Load`.
    """

    storage: torch.UntypedStorage
    recorded: torch.dtype
    dtype: torch.dtype
    is_borrowed: bool = False
    exact: tuple[Ref, Tensor] | None = None
    start: int = 0

    def whole(self) -> Tensor:
        """Return all elements."""
        return typed(self.storage, self.dtype, (self.storage.nbytes() // self.dtype.itemsize,), (1,), 0)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert all elements."""
        if dtype is not self.dtype:
            self.storage, self.dtype, self.is_borrowed = self.whole().to(dtype).untyped_storage(), dtype, False

    def view(self, ref: Ref, dtype: torch.dtype, *, writes: bool) -> Tensor:
        """Return a tensor of this memory in a dtype; a part of it if it is written to, else perhaps a copy."""
        if self.exact is not None and self.exact[0] == ref:
            return self.exact[1]
        if ref.dtype is not self.recorded and self.dtype is not self.recorded:
            raise CannotRerun("the bits of half tensors are read in another dtype")
        if writes:
            if ref.dtype is self.recorded:
                self.convert(dtype)
            if self.is_borrowed:
                self.storage, self.is_borrowed = self.storage.clone(), False
        own = self.dtype if ref.dtype is self.recorded else ref.dtype
        return typed(self.storage, own, ref.size, ref.stride, ref.offset - self.start).to(dtype)


def typed(storage: torch.UntypedStorage, dtype: torch.dtype, size: Any, stride: Any, offset: int) -> Tensor:
    """Return a tensor on a storage."""
    last = sum((many - 1) * step for many, step in zip(size, stride, strict=True))
    if offset < 0 or (0 not in size and (offset + last + 1) * dtype.itemsize > storage.nbytes()):
        raise CannotRerun("a tensor is larger than its memory")
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


class Rerun:
    """A run of a tape. Iterate over it: it yields each operator after it has run, with its arguments and results.

    The results of an operator that was recorded, such as a random one, are None: their values are loaded when they are
    first used. An operator that is chosen for fp32 takes its half arguments in fp32, and its results stay fp32 until an
    operator that is not chosen takes them.

    Args:
        tape: The tape.
        in_fp32: Whether to run an operator in fp32, such as `everything`; by default the tape runs as it was.
        factor: What the gradients with which backward passes begin are multiplied by.

    Attributes:
        tape: As given.
        left_half: Those of the operators so far that were to run in fp32 and have no kernel for it, as flash attention.

    Raises:
        CannotRerun: The tape is incomplete; while it runs: a tensor was written to since, or an operator cannot run.
    """

    def __init__(self, tape: Tape, in_fp32: Choice = lambda op: False, *, factor: float = 1.0) -> None:
        if tape.incomplete is not None:
            raise CannotRerun(tape.incomplete)
        self.tape = tape
        self._in_fp32 = in_fp32
        self.left_half: list[Op] = []
        self._factor = factor
        self._cells: dict[int, _Cell] = {}
        # Memories that are multiplied by the factor as they are.
        self._seeds: set[int] = set()

    def __iter__(self) -> Iterator[tuple[Op, tuple[list[Any], dict[str, Any]], Any]]:
        for event in self.tape.events:
            if isinstance(event, Load):
                self._load(event)
                continue
            if isinstance(event, Seed):
                self._scale(event.ref)
                continue
            wide = self._in_fp32(event)
            if event.is_recorded and not (wide and event.name == "aten::native_dropout"):
                yield event, ([], {}), None
                continue
            # Some kernels look at the grad mode. No tensor here requires gradients, so that no graph is made.
            with undisturbed(), torch.set_grad_enabled(event.grad):
                given, results = self._run(event, wide)
            if event.is_seed:
                self._scale(event.outputs)
            yield event, given, results

    def before(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Called before each operator, with its arguments."""

    def finish(self) -> Rerun:
        """Run to the end, and return itself."""
        for _ in self:
            pass
        return self

    def value(self, ref: Ref) -> Tensor:
        """Return the value of a tensor of the step at this point of the run, in the dtype in which it was computed."""
        with undisturbed():
            cell = self._cell(ref)
            return cell.view(ref, cell.dtype if ref.dtype is cell.recorded else ref.dtype, writes=False).clone()

    def _load(self, load: Load) -> None:
        if load.is_stale:
            raise CannotRerun("a tensor that the step has read was written to since")
        self._cells[load.memory] = _Cell(load.storage, load.dtype, load.dtype, is_borrowed=True, start=load.start)
        self._seeds.discard(load.memory)

    def _scale(self, ref: Ref) -> None:
        """Multiply the gradient with which a backward pass begins, once."""
        if self._factor != 1.0 and ref.memory not in self._seeds:
            with undisturbed():
                cell = self._cell(ref)
                cell.view(ref, cell.dtype, writes=True).mul_(self._factor)
            self._seeds.add(ref.memory)

    def _run(self, op: Op, wide: bool) -> tuple[tuple[list[Any], dict[str, Any]], Any]:
        writes = writes_of(op.func)
        args = [self._given(value, wide, place in writes) for place, value in enumerate(op.args)]
        kwargs = {name: self._given(value, wide, name in writes) for name, value in op.kwargs.items()}
        if wide and op.name in ("aten::_softmax", "aten::_log_softmax"):
            # Whether to make an fp32 result of a half argument, which is fp32 already.
            args[2] = False
        self.before(op, args, kwargs)
        try:
            return (args, kwargs), self._call(op, args, kwargs)
        except Exception as error:
            if wide and not op.is_recorded:
                self.left_half.append(op)
                return self._run(op, wide=False)
            first = str(error).partition("\n")[0]
            raise CannotRerun(f"{op.name} cannot run: {first}") from error

    def _call(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and let its results be the values of the memories that it made."""
        if op.is_recorded:
            mask = self.value(op.outputs[1])
            results: Any = [args[0] * mask * (1.0 / (1.0 - args[1]) if args[1] < 1.0 else 0.0), mask]
        else:
            results = op.func(*args, **kwargs)
        read = {ref.memory for ref in iter_refs((op.args, op.kwargs))}
        taken = {tensor.untyped_storage().data_ptr() for tensor in iter_tensors((args, kwargs))}
        for ref, result in zip(iter_refs(op.outputs), iter_tensors(results), strict=True):
            if ref.memory not in read:
                if op.is_empty:
                    result.zero_()
                self._cells[ref.memory] = _cell_of(ref, result, taken)
        return results

    def _cell(self, ref: Ref) -> _Cell:
        if ref.memory not in self._cells:
            raise CannotRerun("a value was not recorded, or is not computed yet")
        return self._cells[ref.memory]

    def _given(self, value: Any, wide: bool, writes: bool) -> Any:
        """Return an argument: tensors for what refers to them, and fp32 for a half dtype in an fp32 run."""
        if type(value) is Ref:
            return self._cell(value).view(value, _dtype(value.dtype, wide), writes=writes)
        if isinstance(value, (list, tuple)):
            return [self._given(item, wide, writes) for item in value]
        return _dtype(value, wide) if isinstance(value, torch.dtype) else value


def _cell_of(ref: Ref, result: Tensor, taken: set[int]) -> _Cell:
    """Return a result as the value of the memory that the operator made; ``taken`` are the addresses that it was given.

    Another kernel may lay its result out in another way, or return its argument as it is.
    """
    storage = result.untyped_storage()
    if tuple(result.size()) != ref.size:
        return _Cell(storage, ref.dtype, result.dtype, exact=(ref, result))
    if (result.stride(), result.storage_offset()) != (ref.stride, ref.offset) or storage.data_ptr() in taken:
        last = sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride, strict=True))
        room = torch.empty(ref.offset + max(last, 0) + 1, dtype=result.dtype, device=result.device)
        room.as_strided(ref.size, ref.stride, ref.offset).copy_(result)
        storage = room.untyped_storage()
    return _Cell(storage, ref.dtype, result.dtype)


def _dtype(dtype: torch.dtype, wide: bool) -> torch.dtype:
    return torch.float32 if wide and dtype in HALF_DTYPES else dtype
