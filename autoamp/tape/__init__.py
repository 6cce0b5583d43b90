"""The operators of a step, recorded while it runs, and run again by themselves: as they were, or in fp32."""

from __future__ import annotations

from autoamp.tape.contents import Load as Load
from autoamp.tape.contents import Named as Named
from autoamp.tape.contents import Op as Op
from autoamp.tape.contents import Place as Place
from autoamp.tape.contents import Ref as Ref
from autoamp.tape.contents import Seed as Seed
from autoamp.tape.contents import Tape as Tape
from autoamp.tape.contents import iter_refs as iter_refs
from autoamp.tape.contents import writes_of as writes_of
from autoamp.tape.contents import written as written
from autoamp.tape.files import load_tape as load_tape
from autoamp.tape.files import save_tape as save_tape
from autoamp.tape.record import UnnoticedRecording as UnnoticedRecording
from autoamp.tape.record import record as record
from autoamp.tape.rerun import CannotRerun as CannotRerun
from autoamp.tape.rerun import Choice as Choice
from autoamp.tape.rerun import Rerun as Rerun
from autoamp.tape.rerun import everything as everything
