"""Around a module's call: precisions of single modules, models cast to half, casts within modules' calls alone."""

from __future__ import annotations

from autoamp.modules.buffer_writes import BufferWrites as BufferWrites
from autoamp.modules.call import ModuleCalls as ModuleCalls
from autoamp.modules.half_models import CastModels as CastModels
from autoamp.modules.half_models import ForwardDtypes as ForwardDtypes
from autoamp.modules.precisions import ModulePrecisions as ModulePrecisions
from autoamp.modules.precisions import Override as Override
from autoamp.modules.precisions import check_module_rules as check_module_rules
from autoamp.modules.precisions import class_name as class_name
from autoamp.modules.scope import AUTOCAST as AUTOCAST
from autoamp.modules.scope import ModuleCasts as ModuleCasts
