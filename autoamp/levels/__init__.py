"""`initialize()` and its family: opt levels O0 to O3."""

from __future__ import annotations

from autoamp.levels.api import initialize, load_state_dict, master_params, scale_loss, state_dict
from autoamp.levels.setup import LEVELS, LevelName, check_level

__all__ = [
    "LEVELS", "LevelName", "check_level", "initialize", "load_state_dict", "master_params", "scale_loss", "state_dict",
]  # fmt: skip
