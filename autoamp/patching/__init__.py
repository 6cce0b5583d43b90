"""Attributes of others' modules and classes: replaced, marked, and restored exactly. Knows nothing of casts.

Only this package imports wrapt, which finds the object that a dotted name leads to, writes its attributes, and calls
back when a module is imported.
"""

from __future__ import annotations

from autoamp.patching.compilers import CompilerTables, traceable_method
from autoamp.patching.names import explain_missing, resolve, spelled_out
from autoamp.patching.patches import PatchSet, check_writable, imitate, mark, name_by, original_of, writing

__all__ = [
    "CompilerTables",
    "PatchSet",
    "check_writable",
    "explain_missing",
    "imitate",
    "mark",
    "name_by",
    "original_of",
    "resolve",
    "spelled_out",
    "traceable_method",
    "writing",
]
