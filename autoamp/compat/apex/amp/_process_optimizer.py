"""The tree's `apex.amp._process_optimizer`."""

from __future__ import annotations

from autoamp.compat.amp.state import AmpStash as AmpOptimizerState
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
