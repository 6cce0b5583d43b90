"""The tree's `apex.amp.frontend`."""

from __future__ import annotations

from autoamp.compat.amp import initialize
from autoamp.compat.missing import missing_names
from autoamp.compat.state import Properties
from autoamp.levels import LEVELS as opt_levels
from autoamp.levels import load_state_dict, state_dict

__getattr__ = missing_names(__name__)
