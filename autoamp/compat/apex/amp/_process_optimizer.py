"""The tree's `apex.amp._process_optimizer`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.state import AmpStash as AmpOptimizerState

__getattr__ = missing_names(__name__)
