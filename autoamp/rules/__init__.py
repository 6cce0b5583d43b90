"""Which op is cast how: list files are read, checked and merged to one table, without importing torch."""

from __future__ import annotations

from autoamp.rules.loader import ENVIRONMENT_VARIABLE as ENVIRONMENT_VARIABLE
from autoamp.rules.loader import half_model_table as half_model_table
from autoamp.rules.loader import load_table as load_table
from autoamp.rules.loader import located as located
from autoamp.rules.loader import package_tables as package_tables
from autoamp.rules.loader import shipped_sets as shipped_sets
from autoamp.rules.loader import shipped_table as shipped_table
from autoamp.rules.parser import did_you_mean as did_you_mean
from autoamp.rules.parser import fail as fail
from autoamp.rules.table import CastPolicy as CastPolicy
from autoamp.rules.table import CastRule as CastRule
from autoamp.rules.table import CastTable as CastTable
from autoamp.rules.table import ModulePrecision as ModulePrecision
from autoamp.rules.table import ModuleRule as ModuleRule
from autoamp.rules.table import RuleSource as RuleSource
from autoamp.rules.table import admits_version as admits_version
