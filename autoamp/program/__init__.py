"""What the program does, heard in one place: torch is patched where an event happens, and subscribers are told.

The only package that patches attributes of torch that are on no cast list, and that registers torch's global hooks.
"""

from __future__ import annotations

from autoamp.program.events import Subscriber as Subscriber
from autoamp.program.hooks import listen as listen
from autoamp.program.listeners import Cause as Cause
from autoamp.program.listeners import Listener as Listener
from autoamp.program.listeners import Listeners as Listeners
from autoamp.program.program import Program as Program
