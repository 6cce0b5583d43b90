"""The operators of a step, recorded while it runs, and run again by themselves: as they were, or in fp32."""

from __future__ import annotations

from autoamp.tools.tape.contents import Load as Load
from autoamp.tools.tape.contents import Named as Named
from autoamp.tools.tape.contents import Op as Op
from autoamp.tools.tape.contents import Place as Place
from autoamp.tools.tape.contents import Ref as Ref
from autoamp.tools.tape.contents import Seed as Seed
from autoamp.tools.tape.contents import Tape as Tape
from autoamp.tools.tape.contents import iter_refs as iter_refs
from autoamp.tools.tape.contents import writes_of as writes_of
from autoamp.tools.tape.contents import written as written
from autoamp.tools.tape.files import load_tape as load_tape
from autoamp.tools.tape.files import save_tape as save_tape
from autoamp.tools.tape.record import UnnoticedRecording as UnnoticedRecording
from autoamp.tools.tape.record import record as record
from autoamp.tools.tape.rerun import CannotRerun as CannotRerun
from autoamp.tools.tape.rerun import Choice as Choice
from autoamp.tools.tape.rerun import Rerun as Rerun
from autoamp.tools.tape.rerun import everything as everything
