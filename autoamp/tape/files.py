"""Tapes as files: names of operators, plain constants and tensors, which are read without running any code."""

from __future__ import annotations

import os
import pickle
from typing import IO, Any

import torch
from torch import Tensor

from autoamp.errors import TapeError
from autoamp.tape.contents import Load, Op, Place, Ref, Seed, Tape, iter_refs
from autoamp.tape.rerun import typed
from autoamp.tensors import dtype_name
from autoamp.torch_private import OpOverload, undisturbed

_FORMAT, _VERSION = "autoamp.tape", 3
_PHASES = ("forward", "backward", "recomputation")
# Of torch and torchvision. An operator of a program could do anything, and one of these reads and writes files.
_NAMESPACES = ("aten", "mkldnn", "torchvision")
# What is named in a file, by its type. Each name is looked up in torch.
_NAMED: dict[str, Any] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def save_tape(tape: Tape, path: str | os.PathLike[str] | IO[bytes]) -> dict[int, int]:
    """Write a tape to a file. It holds the values that the step took from outside, such as weights and inputs.

    Args:
        tape: A complete tape. No tensor that it read may have been written to since.
        path: The file.

    Returns:
        By how many elements the offset of a `Ref` is smaller in the file, by its memory.

    Raises:
        TapeError: The tape cannot run again.
    """
    if tape.incomplete is not None or any(event.is_stale for event in tape.events if isinstance(event, Load)):
        why = tape.incomplete or "a tensor that it has read was written to since"
        raise TapeError(f"a tape that cannot run again is not saved: {why}")
    shown, events = _shown(tape), []
    shifts = {memory: start for memory, (start, _) in shown.items()}
    for event in tape.events:
        if isinstance(event, Load):
            size = event.storage.nbytes() // event.dtype.itemsize
            start, stop = shown.get(event.memory, (0, size))
            with undisturbed():
                values = typed(event.storage, event.dtype, (stop - start,), (1,), start).clone()
            events.append(["load", event.memory, event.is_made, values])
        elif isinstance(event, Seed):
            events.append(["seed", encoded(event.ref, shifts)])
        else:
            parts = encoded([event.args, event.kwargs, event.outputs, list(event.place)], shifts)
            flags = [event.grad, event.phase, event.is_recorded, event.is_seed]
            events.append(["op", event.func.name(), *parts, *flags])
    torch.save(
        {"format": _FORMAT, "version": _VERSION, "torch": torch.__version__.split("+")[0], "events": events}, path
    )
    return shifts


def load_tape(path: str | os.PathLike[str] | IO[bytes]) -> Tape:
    """Read a tape from a file. No code in the file runs, and texts in it are escaped for a terminal.

    Where the machine has no accelerator its tensors are put on the CPU.

    Raises:
        TapeError: The file is no tape, is damaged, has a newer format or an operator that this torch lacks.
    """
    shown = repr(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else "the file"
    place = None if torch.accelerator.is_available() else "cpu"
    try:
        found = torch.load(path, weights_only=True, map_location=place)
    except OSError as error:
        raise TapeError(f"{shown} cannot be read: {error.strerror}") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError) as bad:
        raise TapeError(f"{shown} is not a tape: it is no file of plain values and tensors") from bad
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise TapeError(f"{shown} is not a tape: expected the format {_FORMAT!r}")
    if found.get("version") != _VERSION:
        version = escaped(str(found.get("version")))
        raise TapeError(
            f"{shown} has version {version} of the format, expected {_VERSION}; use the autoamp that wrote it"
        )
    tape = Tape()
    try:
        for event in found["events"]:
            tape.events.append(_event(event))
    except TapeError:
        raise
    except Exception as error:
        raise TapeError(f"{shown} is a damaged tape: entry {len(tape.events)} is malformed") from error
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


def encoded(value: Any, shifts: dict[int, int]) -> Any:
    """Return an argument as lists, dicts and plain values; a tuple is a type's name and what makes the value.

    Args:
        value: The argument.
        shifts: What `save_tape` returns.
    """
    if isinstance(value, Ref):
        offset = value.offset - shifts.get(value.memory, 0)
        return ("ref", value.memory, dtype_name(value.dtype), list(value.size), list(value.stride), offset)
    if isinstance(value, (list, tuple)):
        return [encoded(item, shifts) for item in value]
    if isinstance(value, dict):
        return {name: encoded(item, shifts) for name, item in value.items()}
    for name, kind in _NAMED.items():
        if isinstance(value, kind):
            return (name, str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return ("device", str(value))
    return ("complex", value.real, value.imag) if isinstance(value, complex) else value


def decoded(value: Any) -> Any:
    """Return what was `encoded`. Raises ValueError and AttributeError if it was something else."""
    match value:
        case ("ref", int(memory), str(dtype), list(size), list(stride), int(offset)):
            if not all(type(one) is int and one >= 0 for one in (memory, *size, *stride, offset)):
                raise ValueError(value)
            return Ref(memory, _named("dtype", dtype), tuple(size), tuple(stride), offset)
        case ("device", str(name)):
            return torch.device(name if torch.accelerator.is_available() else "cpu")
        case ("complex", float(real), float(imaginary)):
            return complex(real, imaginary)
        case (str(kind), str(name)) if type(value) is tuple:
            return _named(kind, name)
        case list():
            return [decoded(item) for item in value]
        case dict():
            return {str(name): decoded(item) for name, item in value.items()}
        case None | bool() | int() | float() | str():
            return value
    raise ValueError(value)


def _named(kind: str, name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _NAMED[kind]):
        raise ValueError(name)
    return found


def _event(value: Any) -> Load | Seed | Op:
    match value:
        case ["seed", ref] if isinstance(begun := decoded(ref), Ref):
            return Seed(begun)
        case ["load", int(memory), bool(is_made), Tensor() as shown] if shown.layout is torch.strided:
            storage = shown.contiguous().untyped_storage()
            return Load(memory, shown.dtype, storage, storage, is_made=is_made)
        case ["op", str(name), list(args), dict(kwargs), outputs, place, bool(), str(phase), bool(), bool()]:
            if phase not in _PHASES:
                raise ValueError(phase)
            namespace, _, rest = name.partition("::")
            base, _, overload = rest.partition(".")
            func = None
            if namespace in _NAMESPACES and base != "from_file":
                func = getattr(getattr(getattr(torch.ops, namespace), base, None), overload or "default", None)
            if not isinstance(func, OpOverload):
                raise TapeError(f"the tape has the operator {escaped(name)!r}, which torch {torch.__version__} lacks")
            given = tuple(decoded(args)), decoded(kwargs), decoded(outputs)
            return Op(func, *given, _place(place), *value[6:])
    raise ValueError(value)


def _place(value: Any) -> Place:
    match value:
        case [function, module, location, list(names), bool(is_cast), bool(in_place), list(classes)]:
            texts = (function, module, location)
            function, module, location = (None if text is None else escaped(text) for text in texts)
            spelled, around = tuple(map(escaped, names)), tuple(map(escaped, classes))
            return Place(function, module, location, spelled, is_cast, in_place, around)
    raise ValueError(value)


def escaped(text: str) -> str:
    """Return a text from a file without what a terminal would act on."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
