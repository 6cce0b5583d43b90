"""The operators of a step, recorded while it runs, and run again by themselves: as they were, or in fp32."""

from __future__ import annotations

from autoamp.tape.contents import Load, Named, Op, Place, Ref, Seed, Tape, iter_refs, writes_of, written
from autoamp.tape.files import load_tape, save_tape
from autoamp.tape.record import UnnoticedRecording, record
from autoamp.tape.rerun import CannotRerun, Rerun, everything

__all__ = [
    "CannotRerun",
    "Load",
    "Named",
    "Op",
    "Place",
    "Ref",
    "Rerun",
    "Seed",
    "Tape",
    "UnnoticedRecording",
    "everything",
    "iter_refs",
    "load_tape",
    "record",
    "save_tape",
    "writes_of",
    "written",
]
