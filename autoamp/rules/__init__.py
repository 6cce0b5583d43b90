"""Which op is cast how: what the list files say, read, checked and merged to one table."""

from __future__ import annotations

from autoamp.rules.loader import ENVIRONMENT_VARIABLE, check_bare_names, load_table, shipped_sets, shipped_table
from autoamp.rules.table import CastPolicy, CastRule, CastTable, ModulePrecision, ModuleRule, Origin, admits

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "CastPolicy",
    "CastRule",
    "CastTable",
    "ModulePrecision",
    "ModuleRule",
    "Origin",
    "admits",
    "check_bare_names",
    "load_table",
    "shipped_sets",
    "shipped_table",
]
