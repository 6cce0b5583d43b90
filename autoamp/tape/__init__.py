"""The operators of a step, recorded while it runs, and run again by themselves: as they were, or in fp32."""

from __future__ import annotations

from autoamp.tape.contents import Load, Op, Place, Ref, Tape
from autoamp.tape.files import load_tape, save_tape
from autoamp.tape.record import record
from autoamp.tape.rerun import CannotRerun, Rerun, everything

__all__ = [
    "CannotRerun",
    "Load",
    "Op",
    "Place",
    "Ref",
    "Rerun",
    "Tape",
    "everything",
    "load_tape",
    "record",
    "save_tape",
]
