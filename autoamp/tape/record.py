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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoamp.tape.contents import Op, Place, Seed, Tape, iter_refs, writes_of, written
from autoamp.tape.memories import Full, Memories, NotOnTape, NoValues
from autoamp.tensors import PLAIN_TYPES, iter_tensors
from autoamp.torch_private import (
    OperatorMode,
    OpOverload,
    Unnoticed,
    compiled_graphs,
    current_graph_task,
    current_node,
    function_of_node,
    insert_modes,
    number_of_node,
    number_of_nodes,
    remove_modes,
    schema_of,
)

log = logging.getLogger(__name__)

MAX_BYTES = 2**30
"""How many bytes of values a tape may hold that the program does not."""

Look = Callable[[Op, Any], object]
"""Called after each operator with its results, while it is recorded."""

# Operators of these namespaces talk to other ranks.
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"))
_Read = list[tuple[Tensor, int]]
"""The tensors that an operator was given, and their memories."""

_CONSTANTS = PLAIN_TYPES | {torch.layout, torch.memory_format}
# With one of these values such an argument keeps an operator that may draw random numbers from doing so.
_NOT_RANDOM = {"dropout_p": 0.0, "dropout": 0.0, "training": False, "train": False}


class _Traits(NamedTuple):
    """What is known of an operator before it is called."""

    name: str
    is_collective: bool
    may_be_random: bool
    # It computes nothing, or a later `Ref` tells what it does.
    is_left_out: bool
    writes: bool


@functools.cache
def _traits_of(func: Any) -> _Traits:
    if not isinstance(func, OpOverload):
        raise NotOnTape(f"{func} is not an operator of a kind that can run again")
    return _Traits(
        str(schema_of(func).name),
        func.namespace in _COLLECTIVES,
        torch.Tag.nondeterministic_seeded in func.tags,
        # After `set_` a tensor shows another memory.
        func.namespace == "profiler" or func.overloadpacket is torch.ops.aten.set_,
        bool(writes_of(func)),
    )


def _draws(func: Any, args: Any) -> bool:
    """Whether a call of what may be random draws numbers. Attention and recurrent layers draw none without dropout."""
    for place, argument in enumerate(schema_of(func).arguments):
        value = args[place] if place < len(args) else argument.default_value
        if argument.name in _NOT_RANDOM and value == _NOT_RANDOM[argument.name]:
            return False
    return True


class _Recorder(OperatorMode):
    """The mode that records.

    Args:
        tape: Where operators go.
        where: Returns the place that is calling now.
        look: See `record`.
        limit: How many bytes the tape may hold.
    """

    def __init__(
        self, tape: Tape, where: Callable[[], Place], look: Look | None, limit: float, undoes: bool = True
    ) -> None:
        super().__init__()
        self._undoes = undoes
        self.tape = tape
        self._where = where
        self._look = look
        self._memories = Memories(tape, limit)
        self._is_full = False
        # Whether a backward pass is about to begin.
        self._begins_backward = False
        # By the number of a node of the graph: the operator that made it, and where that was called.
        self._nodes: dict[int, tuple[str, Place]] = {}
        # A backward pass on a device runs in a thread of its own, which has this mode too.
        self._lock = threading.RLock()
        self._thread = threading.get_ident()

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

    def stop(self, why: str | None = None) -> None:
        """Record no more.

        Args:
            why: Why the rest of the step is not on the tape, if it goes on.
        """
        if why is not None:
            with self._guarded():
                raise NotOnTape(why)
        self._is_full = True

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

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let no error reach the program: the tape says why an operator is missing.

        It goes on, so that `Tape.undo` knows of later writes.
        """
        reason = None
        try:
            with self._lock:
                yield
        except NoValues:
            pass
        except NotOnTape as error:
            reason, self._is_full = str(error), isinstance(error, Full)
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
        traits = _traits_of(func)
        if traits.is_left_out:
            return None
        read: _Read = []
        is_recorded = traits.is_collective or (traits.may_be_random and _draws(func, args))
        refs = self._refs(args, is_recorded, read), self._refs(kwargs, is_recorded, read) if kwargs else kwargs
        if traits.writes or traits.is_collective:
            for ref in iter_refs(refs if traits.is_collective else written(func, *refs)):
                self._memories.keep(ref.memory)
        place, phase = self._place(traits.name, read)
        is_seed = self._begins_backward and func.overloadpacket is torch.ops.aten.ones_like and phase == "forward"
        return Op(func, *refs, None, place, torch.is_grad_enabled(), phase, is_recorded, is_seed), read

    def _refs(self, value: Any, is_recorded: bool, read: _Read) -> Any:
        """Return an argument with `Ref` in the place of tensors, and append these to ``read``.

        An operator that is recorded needs no other arguments.
        """
        if isinstance(value, Tensor):
            ref = self._memories.read(value)
            read.append((value, ref.memory))
            return ref
        if type(value) in _CONSTANTS:
            return value
        if isinstance(value, (list, tuple)):
            return [self._refs(item, is_recorded, read) for item in value]
        if type(value) is dict:
            return {name: self._refs(item, is_recorded, read) for name, item in value.items()}
        if is_recorded:
            return None
        raise NotOnTape(f"an argument is a {type(value).__name__}")

    def _end(self, op: Op, read: _Read, args: Any, kwargs: Any, result: Any) -> None:
        traits, computes = _traits_of(op.func), False
        if traits.writes or traits.is_collective:
            changed = [tensor for tensor, _ in read] if traits.is_collective else written(op.func, args, kwargs)
            for tensor in iter_tensors(changed):
                self._memories.made(tensor, is_recorded=op.is_recorded, is_write=True)
                computes = True
        op.outputs = self._results(result, op.is_recorded)
        if not computes:
            seen = {memory for _, memory in read}
            computes = any(ref.memory not in seen for ref in iter_refs(op.outputs))
        if computes:
            if traits.name == "aten::native_dropout":
                # In fp32 it runs again by its mask, which has to be known by then.
                self._refs(result, True, [])
            self.tape.events.append(op)
            if self._look is not None:
                self._look(op, result)

    def _results(self, result: Any, is_recorded: bool) -> Any:
        if isinstance(result, Tensor):
            if result.is_meta:
                raise NoValues
            return self._memories.made(result, is_recorded=is_recorded)
        if isinstance(result, (list, tuple)):
            return [self._results(item, is_recorded) for item in result]
        return None

    def _place(self, name: str, read: _Read) -> tuple[Place, str]:
        """Return where an operator is called, and the phase of the step."""
        in_backward, grad = current_graph_task() != -1, torch.is_grad_enabled()
        if in_backward and not grad:
            return self._place_of_node(current_node()), "backward"
        place = self._where()
        if threading.get_ident() == self._thread and any(tensor.requires_grad for tensor, _ in read):
            # The node was made just before.
            self._nodes.setdefault(number_of_nodes() - 1, (name, place))
        return place, "recomputation" if in_backward else "forward"

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


class Recording(Unnoticed, _Recorder):
    """The recording of a step, which spans several calls: on from `resume` to `pause`, in the thread that made it.

    The program computes as it does without.

    Args:
        where: As for `record`.
        modes: What else intercepts calls meanwhile.
        limit: As for `record`.
        undoes: Whether `Tape.undo` is to know of all writes, also on a tape that is not complete.

    Attributes:
        tape: The tape.
    """

    def __init__(self, where: Callable[[], Place], *modes: Any, limit: float = MAX_BYTES, undoes: bool = False) -> None:
        super().__init__(Tape(), where, None, limit, undoes)
        self._modes: tuple[Any, ...] = (self, *modes)

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
        super().stop(why)


@contextlib.contextmanager
def record(where: Callable[[], Place] = Place, *, look: Look | None = None, limit: float = MAX_BYTES) -> Iterator[Tape]:
    """Record the operators of this thread in a ``with`` statement, and those of its backward passes.

    Enter and leave it within one call: a dispatch mode that outlives a call of the program changes how torch.compile
    compiles. A call of compiled code runs as it does without; its operators are not on the tape.

    Args:
        where: Returns the place that calls now. It is called for each operator of a forward pass.
        look: Called after each operator, with the `Op` and its results. It must not keep or change these.
        limit: How many bytes the tape may hold that the program does not; the tape is incomplete from there on.

    Yields:
        The tape. Read `Tape.incomplete` after the ``with`` statement.
    """
    tape, graphs = Tape(), compiled_graphs()
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        tape.incomplete = "a CUDA graph is being captured"
    try:
        with _Recorder(tape, where, look, limit):
            yield tape
    finally:
        if compiled_graphs() != graphs:
            tape.incomplete = tape.incomplete or "torch.compile has made code"
