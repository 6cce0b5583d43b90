"""What a tape holds: operators, their arguments, and the values that came from outside of it.

A tensor is known by its memory and its place in it, and not as an object: views of one tensor refer to one memory, so
a write through any of them is right for all. Results of operators are not kept, since they can be computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoamp.core import version_of
from autoamp.torch_private import schema_of, undisturbed

_EMPTY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
# They write to running statistics, which their schemas do not say: the arguments at these places.
_UNDECLARED_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats",
     "batch_norm_gather_stats_with_counts"), (3, 4),
)  # fmt: skip


class Ref(NamedTuple):
    """A tensor of the step: a memory of the tape, and what of it the tensor shows."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Place(NamedTuple):
    """Where an operator was called.

    Attributes:
        function: The function of torch, as lists have it.
        module: The path of the module.
        location: The line of the program.
        names: All names under which lists have the function, as it was called there.
        is_cast: Whether it is a cast that was made for another function.
        in_place: Whether the function writes to its first argument.
        classes: The classes of the modules around it, outermost first, as lists have them.
        instruction: The place of the call in the program's bytecode, which tells two calls on one line apart.
    """

    function: str | None = None
    module: str | None = None
    location: str | None = None
    names: tuple[str, ...] = ()
    is_cast: bool = False
    in_place: bool = False
    classes: tuple[str, ...] = ()
    instruction: int = -1


@dataclass(eq=False, slots=True)
class Load:
    """A memory has a value that no operator of the tape made.

    Attributes:
        memory: The number of the memory.
        dtype: The dtype of its elements.
        origin: The program's storage.
        storage: The value: the program's storage until the step writes to it, from then on a copy.
        owner: The tensor by which the program reaches the storage, if torch counts writes to it; else None.
        version: The number of writes to that tensor so far.
        is_made: Whether an operator of the tape allocated the memory, as a random operator does.
        start: The element of the memory with which the storage begins. A file has what the step has seen of it.
    """

    memory: int
    dtype: torch.dtype
    origin: torch.UntypedStorage
    storage: torch.UntypedStorage
    owner: Tensor | None = None
    version: int | None = None
    is_made: bool = False
    start: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether the program has written to the storage since."""
        with undisturbed():
            if self.owner is None or version_of(self.owner) == self.version:
                return False
            # After ``owner.data = other`` its writes are to another storage.
            return self.owner.untyped_storage().data_ptr() == self.origin.data_ptr()


class Seed(NamedTuple):
    """A backward pass begins with this gradient, which no operator made for it."""

    ref: Ref


@dataclass(eq=False, slots=True)
class Op:
    """A call of an operator that computes or writes something. Views are left out: a `Ref` shows what they show.

    Attributes:
        func: The operator, as ``torch.ops.aten.mm.default``.
        args, kwargs: Its arguments, with a `Ref` in the place of each tensor. Empty for one that never runs again.
        outputs: Its results, with a `Ref` in the place of each tensor.
        place: Where it was called. An operator of a backward pass has the place of the forward operator.
        grad: Whether gradients were recorded.
        phase: ``"forward"``, ``"backward"``, or ``"recomputation"`` for what a checkpoint computes again.
        is_recorded: Whether its results were recorded, since they are random or come from other ranks.
        is_seed: Whether it made the gradient with which a backward pass begins.
        node: The number of the node of the graph that its call made, or whose backward pass it is in; -1 for none. It
            tells two calls of one place apart.
    """

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outputs: Any
    place: Place
    grad: bool
    phase: str
    is_recorded: bool = False
    is_seed: bool = False
    node: int = -1

    @property
    def name(self) -> str:
        """The name of the operator, as ``"aten::mm"``."""
        return str(self.func.name()).partition(".")[0]

    @property
    def is_empty(self) -> bool:
        """Whether its results have no values yet. Run again they are 0, which makes no inf or nan."""
        return self.name in _EMPTY


class Named(NamedTuple):
    """A tensor of a step that has a name.

    Attributes:
        kind: ``"input"``, ``"weight"``, ``"grad"`` or ``"loss"``.
        name: That of the argument of ``forward``, or of the parameter or buffer.
        model: The class of the model.
        ref: What the tape calls it.
        has_grad: Whether an input requires gradients: as a rule an op computed it.
    """

    kind: str
    name: str
    model: str
    ref: Ref
    has_grad: bool = False


@dataclass(eq=False)
class Tape:
    """The operators of a step.

    Attributes:
        events: Operators and values from outside, in the order in which they came.
        incomplete: Why operators of the step are missing on it; None if none are.
        named: Its tensors that have names, if somebody has named them.
        scale: The loss scale of the step.
        half_dtype: The dtype to which the step cast.
        halves: Functions by which lists make fp32 half: whether always, or only what they get beside half tensors.
        nbytes: The bytes of the values that it holds and the program does not.
    """

    events: list[Load | Seed | Op] = field(default_factory=list)
    incomplete: str | None = None
    named: tuple[Named, ...] = ()
    scale: float = 1.0
    half_dtype: torch.dtype = torch.float16
    halves: dict[str, bool] = field(default_factory=dict)
    nbytes: int = 0
    memories: dict[StorageWeakRef, int] = field(default_factory=dict, repr=False)

    @property
    def ops(self) -> Iterator[Op]:
        """The operators, in their order."""
        return (event for event in self.events if isinstance(event, Op))

    def find(self, tensor: Tensor) -> Ref | None:
        """Return what the tape calls a tensor of the program; None if no operator read or made its memory."""
        with undisturbed():
            number = self.memories.get(StorageWeakRef(tensor.untyped_storage()))
            return None if number is None else ref_to(number, tensor)

    def of_kind(self, kind: str) -> set[int]:
        """Return the memories of the tensors that have names of a kind."""
        return {one.ref.memory for one in self.named if one.kind == kind}

    def undo(self) -> None:
        """Give each tensor from outside that the step wrote to the value that it had before.

        What operators wrote that are missing on the tape stays. torch does not count these writes, so that a graph that
        was made before stays valid.
        """
        done = set()
        for event in self.events:
            if isinstance(event, Load) and not event.is_made and event.memory not in done:
                done.add(event.memory)
                if event.storage is not event.origin:
                    with undisturbed():
                        event.origin.copy_(event.storage)


def ref_to(memory: int, tensor: Tensor) -> Ref:
    """Return the `Ref` of a tensor in a memory."""
    return Ref(memory, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))


def iter_refs(value: Any) -> Iterator[Ref]:
    """Yield every `Ref` in nested arguments."""
    if type(value) is Ref:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_refs(item)


@functools.cache
def writes_of(func: Any) -> frozenset[int | str]:
    """Return the places of the arguments that an operator writes to, or their names if they are given by name alone."""
    schema = schema_of(func)
    declared = {
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return frozenset(declared).union(_UNDECLARED_WRITES.get(schema.name.partition("::")[2], ()))


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to."""
    places = writes_of(func)
    return [value for name, value in (*enumerate(args), *kwargs.items()) if name in places] if places else []
