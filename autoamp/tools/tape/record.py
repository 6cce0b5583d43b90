"""Records the operators of a ``with`` statement. It changes nothing: each operator runs once, as it would without.

A dispatch mode sees the operators below autograd and torch's autocast. What it cannot see, such as a kernel that is
called past the dispatcher, or what another thread computes, is no operator of the tape: its results are values from
outside.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoamp.core import version_of
from autoamp.tensors import PLAIN_TYPES, is_capturing, iter_tensors, map_tensors
from autoamp.tools.tape.contents import Load, Op, Place, Ref, Seed, Tape, iter_refs, ref_to, written
from autoamp.torch_private import (
    OperatorMode,
    OpOverload,
    Unnoticed,
    compiled_graphs,
    current_graph_task,
    current_node,
    function_of_node,
    insert_modes,
    is_transformed,
    number_of_node,
    number_of_nodes,
    remove_modes,
    schema_of,
    undisturbed,
)

log = logging.getLogger(__name__)

MAX_BYTES = 2**30
"""How many bytes of values a tape may hold that the program does not."""

# Operators of these namespaces talk to other ranks.
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"))
_Read = list[tuple[Tensor, int]]
"""The tensors that an operator was given, and their memories."""

_CONSTANTS = PLAIN_TYPES | {torch.layout, torch.memory_format}
# With one of these values such an argument keeps an operator that may draw random numbers from doing so.
_NOT_RANDOM = {"dropout_p": 0.0, "dropout": 0.0, "training": False, "train": False}


class _NotOnTape(Exception):
    """An operator cannot be recorded. The message says why."""


class _NoValues(Exception):
    """A tensor is on the meta device, where nothing is computed."""


def _draws(func: Any, args: Any) -> bool:
    """Whether a call draws random numbers. Attention and recurrent layers draw none without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(schema_of(func).arguments):
        value = args[place] if place < len(args) else argument.default_value
        if argument.name in _NOT_RANDOM and value == _NOT_RANDOM[argument.name]:
            return False
    return True


class _Memories:
    """The memories of a tape, and what is known of their values.

    Args:
        tape: Where values from outside go.
        limit: How many bytes it may hold.
    """

    def __init__(self, tape: Tape, limit: float) -> None:
        self._tape = tape
        self.limit = limit
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
            raise _NotOnTape("a tensor is conjugated or negated lazily")
        if tensor.is_meta:
            raise _NoValues
        number, is_new = self._number(tensor)
        if is_new or number in self._unknown or (version_of(tensor) or 0) > self._versions[number]:
            self._load(number, tensor)
        return ref_to(number, tensor)

    def made(self, tensor: Tensor, *, is_recorded: bool, is_write: bool = False) -> Ref:
        """Return the `Ref` of a result, or of an argument that was written to."""
        if tensor.is_meta:
            raise _NoValues
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
            raise _NotOnTape(f"a tensor is a {kind.__name__}")
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
            raise _NotOnTape("a tensor was written to, and no operator of this thread did that")
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
        if self._tape.nbytes > self.limit:
            raise _NotOnTape(f"the tape would hold more than {self.limit / 2**20:g} MiB")


class Recording(OperatorMode):
    """The recording of a step, which may span several calls: on from `resume` to `pause`, in the thread that made it.

    The program computes as it does without.

    Args:
        where: Returns the place that calls now. It is called for each operator of a forward pass.
        modes: What else intercepts calls meanwhile.
        look: Called after each operator, with the `Op` and its results. It must not keep or change these.
        limit: How many bytes the tape may hold that the program does not; the tape is incomplete from there on.
        undoes: Whether `Tape.undo` is to know of all writes, also on a tape that is not complete.

    Attributes:
        tape: The tape.
    """

    def __init__(
        self,
        where: Callable[[], Place],
        *modes: Any,
        look: Callable[[Op, Any], object] | None = None,
        limit: float = MAX_BYTES,
        undoes: bool = False,
    ) -> None:
        super().__init__()
        self.tape = Tape()
        self._modes: tuple[Any, ...] = (self, *modes)
        self._undoes = undoes
        self._where = where
        self._look = look
        self._memories = _Memories(self.tape, limit)
        self._is_full = False
        # Whether a backward pass is about to begin.
        self._begins_backward = False
        # By the number of a node of the graph: the operator that made it, and where that was called.
        self._nodes: dict[int, tuple[str, Place]] = {}
        # A backward pass on a device runs in a thread of its own, which has this mode too.
        self._lock = threading.RLock()
        self._thread = threading.get_ident()

    def resume(self) -> None:
        """Record from now on, if this is the thread of the recording."""
        if threading.get_ident() == self._thread:
            insert_modes(*self._modes)

    def pause(self) -> None:
        """Record no more in this thread."""
        remove_modes(*self._modes)

    def stop(self, why: str | None = None) -> None:
        """Record no more, in any thread.

        Args:
            why: Why the rest of the step is not on the tape, if it goes on.
        """
        self.pause()
        if why is not None:
            with self._guarded():
                raise _NotOnTape(why)
        self._is_full = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = None
        if not self._is_full:
            with self._guarded():
                before = self._begin(func, args, kwargs)
        result = func(*args, **kwargs)
        if before is not None and not self._is_full:
            with self._guarded():
                self._end(*before, args, kwargs, result)
        return result

    @contextlib.contextmanager
    def begin_backward(self, given: Any) -> Iterator[None]:
        """Within the ``with`` statement a backward pass runs, by these gradients or by 1."""
        before, self._begins_backward = self._begins_backward, True
        try:
            if not self._is_full:
                with self._guarded():
                    refs = [self._memories.read(tensor) for tensor in iter_tensors(given)]
                    self.tape.events += [Seed(ref) for ref in refs]
            yield
        finally:
            self._begins_backward = before

    def keep_half(self, tensor: Tensor) -> None:
        """Note that the program casts a half tensor to half: what would be fp32 there is half from there on."""
        if self._is_full or is_transformed(tensor) or tensor.layout is not torch.strided:
            return
        with self._guarded():
            # What no operator of the step has made or read is half in any case.
            if (ref := self.tape.find(tensor)) is not None:
                place, phase, _ = self._place("", [])
                # It writes what is there.
                self.tape.events.append(Op(torch.ops.aten.mul_.Scalar, [ref, 1], {}, ref, place, False, phase))

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let no error reach the program: the tape says why an operator is missing.

        It goes on, so that `Tape.undo` knows of later writes.
        """
        reason = None
        try:
            with self._lock:
                yield
        except _NoValues:
            pass
        except _NotOnTape as error:
            reason, self._is_full = str(error), self.tape.nbytes > self._memories.limit
        except NotImplementedError:
            # So do sparse and opaque tensors answer who asks for their memory.
            reason = "a tensor has no memory of its own, as a sparse one"
        except Exception as error:
            log.debug("an operator is not recorded", exc_info=True)
            reason = f"the recording failed: {type(error).__name__}: {error}"
        self.tape.incomplete = self.tape.incomplete or reason
        if reason is not None and not self._undoes:
            # Nothing of it runs again.
            self._is_full = True
            self.tape.events.clear()

    def _begin(self, func: Any, args: Any, kwargs: Any) -> tuple[Op, _Read] | None:
        """Return the operator that is about to run, and the tensors that it was given."""
        if not isinstance(func, OpOverload):
            raise _NotOnTape(f"{func} is not an operator of a kind that can run again")
        # The one computes nothing. After the other a tensor shows another memory, as later `Ref`s tell.
        if func.namespace == "profiler" or func.overloadpacket is torch.ops.aten.set_:
            return None
        read: _Read = []
        is_collective = func.namespace in _COLLECTIVES
        is_recorded = is_collective or _draws(func, args)
        refs = self._refs(args, is_recorded, read), self._refs(kwargs, is_recorded, read) if kwargs else kwargs
        for ref in iter_refs(refs if is_collective else written(func, *refs)):
            self._memories.keep(ref.memory)
        place, phase, node = self._place(func.name(), read)
        is_seed = self._begins_backward and func.overloadpacket is torch.ops.aten.ones_like and phase == "forward"
        return Op(func, *refs, None, place, torch.is_grad_enabled(), phase, is_recorded, is_seed, node), read

    def _refs(self, value: Any, is_recorded: bool, read: _Read) -> Any:
        """Return an argument with `Ref` in the place of tensors, and append these to ``read``.

        An operator that is recorded needs no other arguments.
        """

        def ref_of(tensor: Tensor) -> Ref:
            ref = self._memories.read(tensor)
            read.append((tensor, ref.memory))
            return ref

        def constant(other: Any) -> Any:
            if type(other) in _CONSTANTS:
                return other
            if not is_recorded:
                raise _NotOnTape(f"an argument is a {type(other).__name__}")
            return None

        return map_tensors(value, ref_of, constant)

    def _end(self, op: Op, read: _Read, args: Any, kwargs: Any, result: Any) -> None:
        is_collective, seen = op.func.namespace in _COLLECTIVES, {memory for _, memory in read}
        changed = [tensor for tensor, _ in read] if is_collective else written(op.func, args, kwargs)
        for tensor in iter_tensors(changed):
            self._memories.made(tensor, is_recorded=op.is_recorded, is_write=True)
        made = functools.partial(self._memories.made, is_recorded=op.is_recorded)
        op.outputs = map_tensors(result, made, lambda other: None)
        if changed or any(ref.memory not in seen for ref in iter_refs(op.outputs)):
            if op.name == "aten::native_dropout":
                # In fp32 it runs again by its mask, which has to be known by then.
                self._refs(result, True, [])
            self.tape.events.append(op)
            if self._look is not None:
                self._look(op, result)

    def _place(self, name: str, read: _Read) -> tuple[Place, str, int]:
        """Return where an operator is called, the phase of the step, and the number of the node."""
        in_backward, grad = current_graph_task() != -1, torch.is_grad_enabled()
        if in_backward and not grad:
            node = current_node()
            return self._place_of_node(node), "backward", -1 if node is None else number_of_node(node)
        place, number = self._where(), -1
        if in_backward and place.function is None:
            # No code computes again: this is a gradient that has a graph of its own.
            place = self._place_of_node(current_node())
        if threading.get_ident() == self._thread and any(tensor.requires_grad for tensor, _ in read):
            # The node was made just before.
            number = number_of_nodes() - 1
            self._nodes.setdefault(number, (name, place))
        return place, "recomputation" if in_backward else "forward", number

    def _place_of_node(self, node: Any) -> Place:
        """Return the place of a node of the graph. It is unknown in doubt: a wrong line is worse than none."""
        made_by, place = self._nodes.get(-1 if node is None else number_of_node(node), ("", Place()))
        function = None if node is None else function_of_node(node)
        if function is not None:
            # The program's line is in its backward function, if that is not torch's.
            if function.__module__.partition(".")[0] in ("torch", "autoamp"):
                return Place()
            return Place(function.__name__, place.module, self._where().location)
        return place if made_by and _made_by(node, made_by) else Place()


def _made_by(node: Any, name: str) -> bool:
    """Whether a node can be that of an operator, as ``NllLossBackward0`` is that of ``nll_loss_forward``."""
    stem = node.name().lower().partition("backward")[0]
    return bool(stem) and name.partition("::")[2].replace("_", "").startswith(stem)


class UnnoticedRecording(Unnoticed, Recording):
    """A recording that nobody who asks for modes notices: kernels that show no operators run as without it."""


@contextlib.contextmanager
def record(where: Callable[[], Place] = Place, **options: Any) -> Iterator[Tape]:
    """Record the operators of this thread in a ``with`` statement, and those of its backward passes.

    Enter and leave it within one call: a dispatch mode that outlives a call of the program changes how torch.compile
    compiles. A call of compiled code runs as it does without; its operators are not on the tape.

    Args:
        where: As for `Recording`.
        options: ``look`` and ``limit``, as for `Recording`.

    Yields:
        The tape. Read `Tape.incomplete` after the ``with`` statement.
    """
    recording, graphs = Recording(where, undoes=True, **options), compiled_graphs()
    if is_capturing():
        recording.tape.incomplete = "a CUDA graph is being captured"
    recording.resume()
    try:
        yield recording.tape
    finally:
        recording.stop()
        if compiled_graphs() != graphs:
            recording.tape.incomplete = recording.tape.incomplete or "torch.compile has made code"
