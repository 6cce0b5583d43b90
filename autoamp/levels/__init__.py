"""`initialize()` and its family: opt levels O0 to O3."""

from __future__ import annotations

from autoamp.levels.api import LEVELS, check_level, initialize, load_state_dict, master_params, scale_loss, state_dict

__all__ = ["LEVELS", "check_level", "initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]
