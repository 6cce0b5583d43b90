"""The tree's `apex.amp.wrap`: its functions wrote into torch's namespace; they register functions now."""

from __future__ import annotations

from autoamp.compat.amp import utils
from autoamp.compat.amp.wrapping import cached_cast, make_cast_wrapper, make_promote_wrapper, promote, sequence_promote
from autoamp.compat.missing import missing_names
from autoamp.runtime import disable_casts

__getattr__ = missing_names(__name__)
