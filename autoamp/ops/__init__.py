"""From a rule to a replacement: the functions that torch's names are patched with."""

from __future__ import annotations

from autoamp.ops.autocast_regions import AutocastRegions as AutocastRegions
from autoamp.ops.autocast_state import autocast_functions as autocast_functions
from autoamp.ops.fallbacks import FALLBACKS as FALLBACKS
from autoamp.ops.policies import build_replacement as build_replacement
from autoamp.ops.targets import Target as Target
from autoamp.ops.targets import expand as expand
from autoamp.ops.targets import known_ops as known_ops
from autoamp.ops.targets import locate as locate
from autoamp.ops.targets import owns_its_names as owns_its_names
from autoamp.ops.targets import target_at as target_at
from autoamp.ops.unlisted import unlisted_functions as unlisted_functions
