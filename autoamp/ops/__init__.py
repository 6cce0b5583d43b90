"""From a rule to a replacement: the functions that torch's names are patched with."""

from __future__ import annotations

from autoamp.ops.autocast_regions import AutocastRegions
from autoamp.ops.list_checks import AutocastDifference, autocast_differences, check_lists
from autoamp.ops.policies import build_for_half_models, build_replacement
from autoamp.ops.targets import Target, expand, known_ops, locate, owns_its_names, target_at
from autoamp.ops.unlisted import unlisted_functions

__all__ = [
    "AutocastDifference",
    "AutocastRegions",
    "Target",
    "autocast_differences",
    "build_for_half_models",
    "build_replacement",
    "check_lists",
    "expand",
    "known_ops",
    "locate",
    "owns_its_names",
    "target_at",
    "unlisted_functions",
]
