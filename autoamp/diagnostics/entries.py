"""Entries of a list file that keep ops in fp32. Each is tried on the tape of a step before it is suggested."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoamp.diagnostics.op_names import CASTS, fp32_entry
from autoamp.tape import Op, Place, Tape, iter_refs
from autoamp.tensors import HALF_DTYPES

Choice = Callable[[Op], bool]
"""Which operators of a tape run in fp32."""

# So many ops are tried that made the inputs of an op, and so many modules around it.
_MAX_OPS, _MAX_MODULES = 4, 3
# All lists have these in half precision.
_PRODUCTS = re.compile(r"mm|conv|dot|mv|lstm|gru|rnn|attention|linear")


@dataclass(frozen=True)
class Entry:
    """An entry of a list file.

    Attributes:
        names: The functions that it keeps in fp32.
        module: The class that it keeps in fp32 under ``[modules]``, if it names no functions.
    """

    names: tuple[str, ...] = ()
    module: str | None = None

    def acts_on(self, op: Op) -> bool:
        """Whether it acts on an op. No list acts on one without tensors, as `torch.arange`."""
        if next(iter_refs((op.args, op.kwargs)), None) is None:
            return False
        return self.module in op.place.classes or not set(self.names).isdisjoint(op.place.names)

    def advice(self, in_place: bool = False) -> str:
        """Return the sentence that suggests it, which was tried; ``in_place`` is that of `fp32_entry`."""
        if self.module is not None:
            return f'add "{self.module}" = "fp32" under [modules] to the list file (tried)'
        return str(fp32_entry(self.names, in_place)).replace("to the list file", "to the list file (tried)")


def is_half(op: Op) -> bool:
    """Whether an op has a result in half precision, or begins with a cast to it."""
    return op.place.is_cast or any(ref.dtype in HALF_DTYPES for ref in iter_refs(op.outputs))


def is_product(op: Op) -> bool:
    """Whether an op is one for whose speed people take half precision."""
    return _PRODUCTS.search(op.name) is not None


def half_ops_before(tape: Tape, op: Op) -> Iterator[Op]:
    """Yield the ops in half precision that an op's arguments were computed by, the last ones first."""
    ops = list(tape.ops)
    wanted = {ref.memory for ref in iter_refs((op.args, op.kwargs))}
    for earlier in reversed(ops[: ops.index(op)]):
        if not wanted.isdisjoint(ref.memory for ref in iter_refs(earlier.outputs)):
            wanted.update(ref.memory for ref in iter_refs((earlier.args, earlier.kwargs)))
            if is_half(earlier):
                yield earlier


def entries_for(tape: Tape, op: Op, own: tuple[str, ...]) -> Iterator[Entry]:
    """Yield what could keep an op from losing values, in the order in which it is tried.

    That is the op in fp32, then the ops that made its inputs as well, then a module of the program's around it. Entries
    that are in force already are left out, and all but the first that leave no product of the step in half precision.

    Args:
        tape: The step.
        op: The op.
        own: The names of the op that an entry has.
    """
    found = []
    names = own if is_half(op) else ()
    if names:
        yield Entry(names)
    before = (earlier for earlier in half_ops_before(tape, op) if earlier.place.names)
    for earlier in itertools.islice(before, _MAX_OPS):
        if not set(earlier.place.names) <= set(names):
            names = tuple(dict.fromkeys((*names, *earlier.place.names)))
            found.append(Entry(names))
    yield from (entry for entry in (*found, *module_entries(op)) if keeps_products(tape, entry.acts_on))


def module_entries(op: Op) -> list[Entry]:
    """Return the entries for the modules of the program around an op, the innermost first."""
    names = dict.fromkeys(name for name in reversed(op.place.classes) if not name.startswith("torch."))
    return [Entry(module=name) for name in names][:_MAX_MODULES]


def keeps_products(tape: Tape, chosen: Choice) -> bool:
    """Whether products of the step stay in half precision, if there are any, without some operators."""
    products = [op for op in tape.ops if op.phase != "backward" and is_half(op) and is_product(op)]
    return not products or not all(map(chosen, products))


def in_fp32_with(tape: Tape, has: Choice, *, within: bool = False) -> Choice:
    """Return which operators run in fp32 if some do, as an entry of a list makes them.

    What gets their fp32 results computes in fp32 too, but for products and for what else half copies were made for.

    Args:
        tape: The step.
        has: Whether an operator is one of these.
        within: Whether they are all that is called in some modules, in which half tensors that the program itself makes
            stay half.
    """
    casts: dict[int, Place] = {}
    chosen: set[Place] = set()
    wide: set[int] = set()
    # Half tensors that the program makes within the modules.
    own_half: set[int] = set()
    # Operators of a backward pass have the places of those of the forward pass.
    for op in (op for op in tape.ops if op.phase != "backward"):
        given, results = list(iter_refs((op.args, op.kwargs))), list(iter_refs(op.outputs))
        read, made = {ref.memory for ref in given}, {ref.memory for ref in results}
        feeding = {casts[memory] for memory in read if memory in casts}
        makes_half = any(ref.dtype in HALF_DTYPES for ref in results)
        is_promoted = not read.isdisjoint(wide)
        is_listed = has(op)
        if is_listed and within and not op.place.is_cast:
            halves = {ref.memory for ref in given if ref.dtype in HALF_DTYPES}
            is_listed = op.place.function not in CASTS and not (halves and halves <= own_half)
            own_half |= made if makes_half and not is_listed else set()
        if op.place.is_cast:
            casts.update(dict.fromkeys(made, op.place))
            # A cast to fp32 of what is fp32 by the entry, whose gradient is then fp32 too.
            chosen |= {op.place} if is_promoted and not makes_half else set()
        elif is_listed:
            chosen |= {op.place, *feeding}
            wide |= made
        elif is_promoted and not (makes_half and (feeding or op.place.function in CASTS or is_product(op))):
            chosen.add(op.place)
            wide |= made
    return lambda op: op.place in chosen
