"""Around a module's call: precisions of single modules, models cast to half, casts within modules' calls alone."""

from __future__ import annotations

from autoamp.modules.buffer_writes import BufferWrites
from autoamp.modules.call import CallRecorder, ModuleCalls
from autoamp.modules.half_models import CastModels, ForwardDtypes
from autoamp.modules.precisions import ModulePrecisions, Override, check_module_rules, class_name
from autoamp.modules.scope import AUTOCAST, ModuleCasts

__all__ = [
    "AUTOCAST",
    "BufferWrites",
    "CallRecorder",
    "CastModels",
    "ForwardDtypes",
    "ModuleCalls",
    "ModuleCasts",
    "ModulePrecisions",
    "Override",
    "check_module_rules",
    "class_name",
]
