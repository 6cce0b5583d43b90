"""Attributes of others' modules and classes: replaced, marked, and restored exactly. Knows nothing of casts.

Only this package imports wrapt, which finds the object that a dotted name leads to, writes its attributes, and calls
back when a module is imported.
"""

from __future__ import annotations

from autoamp.patching.compilers import CompilerTables as CompilerTables
from autoamp.patching.compilers import traceable_method as traceable_method
from autoamp.patching.names import explain_missing as explain_missing
from autoamp.patching.names import resolve as resolve
from autoamp.patching.names import spelled_out as spelled_out
from autoamp.patching.patches import PatchSet as PatchSet
from autoamp.patching.patches import check_writable as check_writable
from autoamp.patching.patches import imitate as imitate
from autoamp.patching.patches import mark as mark
from autoamp.patching.patches import name_by as name_by
from autoamp.patching.patches import original_of as original_of
from autoamp.patching.patches import writing as writing
