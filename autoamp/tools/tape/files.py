"""Tapes as files: names of operators, plain constants and tensors, which are read without running any code."""

from __future__ import annotations

import os
from typing import IO, Any

import torch
from torch import Tensor

from autoamp.errors import TapeError
from autoamp.tensors import HALF_DTYPES, PLAIN_TYPES
from autoamp.tools.tape.contents import Load, Named, Op, Place, Ref, Seed, Tape, iter_refs
from autoamp.tools.tape.rerun import typed
from autoamp.torch_private import OpOverload, undisturbed

# Of torch and torchvision. An operator of a program could do anything, and one of these reads and writes files.
_NAMESPACES = ("aten", "mkldnn", "torchvision")
_CONSTANTS = PLAIN_TYPES | {torch.layout}
# All that a file has besides plain values and tensors. To make one runs no code.
_TUPLES: list[Any] = [Ref, Place, Named]


def save_tape(tape: Tape, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a tape to a file. It holds the values that the step took from outside, such as weights and inputs.

    Args:
        tape: A complete tape. No tensor that it read may have been written to since.
        path: The file.

    Raises:
        TapeError: The tape cannot run again.
    """
    if tape.incomplete is not None or any(event.is_stale for event in tape.events if isinstance(event, Load)):
        why = tape.incomplete or "a tensor that it has read was written to since"
        raise TapeError(f"a tape that cannot run again is not saved: {why}")
    shown, events = _shown(tape), []
    for event in tape.events:
        if isinstance(event, Load):
            size = event.storage.nbytes() // event.dtype.itemsize
            start, stop = shown.get(event.memory, (0, size))
            with undisturbed():
                values = typed(event.storage, event.dtype, (stop - start,), (1,), start).clone()
            events.append(["load", event.memory, event.is_made, start, values])
        elif isinstance(event, Seed):
            events.append(["seed", event.ref])
        else:
            given = _written([event.args, event.kwargs, event.outputs])
            flags = [event.grad, event.phase, event.is_recorded, event.is_seed, event.node]
            events.append(["op", event.func.name(), *given, event.place, *flags])
    about = {"named": tape.named, "scale": tape.scale, "half_dtype": tape.half_dtype, "halves": tape.halves}
    torch.save({**about, "events": events}, path)


def load_tape(path: str | os.PathLike[str] | IO[bytes]) -> Tape:
    """Read a tape from a file. No code in the file runs. Texts in it may hold what a terminal acts on.

    Where the machine has no accelerator its tensors are put on the CPU.

    Raises:
        TapeError: The file is no tape, is damaged, or has an operator that this torch lacks.
    """
    tape = Tape()
    try:
        with torch.serialization.safe_globals(_TUPLES):
            place = None if torch.accelerator.is_available() else "cpu"
            found = torch.load(path, weights_only=True, map_location=place)
        for event in found["events"]:
            tape.events.append(_event(event))
        tape.named = tuple(map(_read, found["named"]))
        tape.scale, tape.half_dtype = float(found["scale"]), found["half_dtype"]
        tape.halves = {str(name): bool(always) for name, always in found["halves"].items()}
        if tape.half_dtype not in HALF_DTYPES:
            raise ValueError(tape.half_dtype)
    except TapeError:
        raise
    except Exception as error:
        raise TapeError(f"it is no tape, or a damaged one: entry {len(tape.events)} is malformed") from error
    return tape


def _shown(tape: Tape) -> dict[int, tuple[int, int]]:
    """Return for memories from outside which elements of them the step has seen, of a large data set perhaps a few."""
    dtypes = {event.memory: event.dtype for event in tape.events if isinstance(event, Load) and not event.is_made}
    shown: dict[int, tuple[int, int]] = {}
    for ref in iter_refs([(op.args, op.kwargs, op.outputs) for op in tape.ops]):
        if dtypes.get(ref.memory) is not ref.dtype:
            dtypes.pop(ref.memory, None)
            continue
        last = sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride, strict=True))
        start, stop = shown.get(ref.memory, (ref.offset, 0))
        shown[ref.memory] = min(start, ref.offset), max(stop, ref.offset + last + 1)
    return {memory: bounds for memory, bounds in shown.items() if memory in dtypes}


def _written(value: Any) -> Any:
    """Return an argument as it is written."""
    if type(value) is list or type(value) is tuple:
        return [_written(item) for item in value]
    if isinstance(value, dict):
        return {name: _written(item) for name, item in value.items()}
    # torch cannot write these to a file.
    is_format = isinstance(value, torch.memory_format)
    return ("memory_format", str(value).removeprefix("torch.")) if is_format else value


def _read(value: Any) -> Any:
    """Return what was `_written`. Raises ValueError and AttributeError if it was something else."""
    match value:
        case Ref(int(), torch.dtype(), tuple(size), tuple(stride), int()):
            if all(type(one) is int and one >= 0 for one in (value.memory, *size, *stride, value.offset)):
                return value
        case Named(str(), str(), str(), Ref() as ref, bool()):
            _read(ref)
            return value
        case Place(str() | None, str() | None, str() | None, tuple(names), bool(), bool(), tuple(classes), int()):
            if all(type(text) is str for text in (*names, *classes)):
                return value
        case torch.device():
            return value if torch.accelerator.is_available() else torch.device("cpu")
        case tuple(("memory_format", str(name))) if isinstance(found := getattr(torch, name), torch.memory_format):
            return found
        case list():
            return [_read(item) for item in value]
        case dict():
            return {str(name): _read(item) for name, item in value.items()}
    if type(value) not in _CONSTANTS:
        raise ValueError(value)
    return value


def _event(value: Any) -> Load | Seed | Op:
    match value:
        case ["seed", Ref() as ref]:
            return Seed(_read(ref))
        case ["load", int(memory), bool(is_made), int(start), Tensor() as shown] if shown.layout is torch.strided:
            storage = shown.contiguous().untyped_storage()
            return Load(memory, shown.dtype, storage, storage, is_made=is_made, start=start)
        case ["op", str(name), list(args), dict(kwargs), outputs, Place() as place, *flags]:
            match flags:
                case [bool(), "forward" | "backward" | "recomputation", bool(), bool(), int()]:
                    pass
                case _:
                    raise ValueError(flags)
            namespace, _, rest = name.partition("::")
            base, _, overload = rest.partition(".")
            func = None
            if namespace in _NAMESPACES and base != "from_file":
                func = getattr(getattr(getattr(torch.ops, namespace), base, None), overload or "default", None)
            if not isinstance(func, OpOverload):
                raise TapeError(f"the tape has the operator {name!r}, which torch {torch.__version__} lacks")
            return Op(func, _read(args), _read(kwargs), _read(outputs), _read(place), *flags)
    raise ValueError(value)
