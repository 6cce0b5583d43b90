"""From a rule to a replacement: the functions that torch's names are patched with."""

from __future__ import annotations

from autoamp.ops.autocast_regions import AutocastRegions as AutocastRegions
from autoamp.ops.autocast_state import autocast_functions as autocast_functions
