"""From a rule to a replacement: the functions that torch's names are patched with."""

from __future__ import annotations

from autoamp.ops.attention import build_fast_path_check, builders_for_half_models
from autoamp.ops.autocast_lists import AutocastDifference, autocast_differences
from autoamp.ops.autocast_regions import AutocastRegions
from autoamp.ops.drift import check_lists
from autoamp.ops.policies import build_for_half_models, build_replacement
from autoamp.ops.recurrent import build_check_input
from autoamp.ops.scripted import builders_for_scripts
from autoamp.ops.targets import Expansion, Target, expand, known_ops, locate, owns_its_names, target_at

__all__ = [
    "AutocastDifference",
    "AutocastRegions",
    "Expansion",
    "Target",
    "autocast_differences",
    "build_check_input",
    "build_fast_path_check",
    "build_for_half_models",
    "build_replacement",
    "builders_for_half_models",
    "builders_for_scripts",
    "check_lists",
    "expand",
    "known_ops",
    "locate",
    "owns_its_names",
    "target_at",
]
