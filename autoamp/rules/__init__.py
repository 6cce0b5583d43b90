"""Which op is cast how: list files are read, checked and merged to one table, without importing torch."""

from __future__ import annotations

from autoamp.rules.loader import (
    ENVIRONMENT_VARIABLE,
    check_bare_names,
    load_table,
    located,
    package_tables,
    shipped_sets,
    shipped_table,
)
from autoamp.rules.parser import fail
from autoamp.rules.table import CastPolicy, CastRule, CastTable, ModulePrecision, ModuleRule, RuleSource, admits_version

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "CastPolicy",
    "CastRule",
    "CastTable",
    "ModulePrecision",
    "ModuleRule",
    "RuleSource",
    "admits_version",
    "check_bare_names",
    "fail",
    "load_table",
    "located",
    "package_tables",
    "shipped_sets",
    "shipped_table",
]
