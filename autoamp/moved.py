"""Packages that have moved: their names of earlier versions stay importable, and pickles that have them load.

An import by an old name gives the module of the new name itself. This file imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

# The old name below `autoamp`, and the new one. What lies below an old name lies below the new one, unless it is here.
MOVED = {
    "compat": "apex",
    "formulas": "apex.formulas",
    "fp16_utils": "apex.fp16_utils",
    "fp16_utils.loss_scalers": "apex.fp16_utils.loss_scaler",
    "fp16_utils.models": "apex.fp16_utils.fp16util",
    "levels": "apex.initialize",
    "levels.api": "apex.initialize",
    "levels.setup": "apex.levels",
    "normalization": "apex.normalization.fused_layer_norm",
    "optimizers": "apex.optimizers",
    "optimizers.adagrad": "apex.optimizers.fused_adagrad",
    "optimizers.adam": "apex.optimizers.fused_adam",
    "optimizers.lamb": "apex.optimizers.fused_lamb",
    "optimizers.mixed_precision_lamb": "apex.optimizers.fused_mixed_precision_lamb",
    "optimizers.novograd": "apex.optimizers.fused_novograd",
    "optimizers.sgd": "apex.optimizers.fused_sgd",
    "parallel": "apex.parallel",
    "parallel.larc": "apex.parallel.LARC",
}


class SameModule(importlib.abc.InspectLoader):
    """Gives the module of another name itself, and imports it first if it is not imported yet.

    Args:
        spec: The spec of the other name.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Import the module."""
        return importlib.import_module(self._spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module back its spec: the import system has written the one of this name over it."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Return the module's code, which ``python -m`` runs."""
        loader: Any = self._spec.loader
        code: types.CodeType | None = loader.get_code(self._spec.name)
        return code

    def get_source(self, fullname: str) -> str | None:
        """Return the module's source."""
        loader: Any = self._spec.loader
        source: str | None = loader.get_source(self._spec.name)
        return source


def same_as(fullname: str, other: str) -> ModuleSpec | None:
    """Return a spec by which ``import fullname`` gives the module ``other``; None if there is no such module."""
    spec = importlib.util.find_spec(other)
    if spec is None:
        return None
    found = ModuleSpec(fullname, SameModule(spec), origin=spec.origin)
    found.submodule_search_locations = spec.submodule_search_locations
    return found


class _MovedFinder(importlib.abc.MetaPathFinder):
    """Finds modules by their old names. It comes before the finder that would look into the folder of the parent."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec on the module of the new name; None for a name that has not moved."""
        top, _, old = fullname.partition(".")
        if top != "autoamp":
            return None
        below = ""
        while old and old not in MOVED:
            old, _, last = old.rpartition(".")
            below = f".{last}{below}"
        return same_as(fullname, f"autoamp.{MOVED[old]}{below}") if old else None


def install() -> None:
    """Let old names be imported."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedFinder())
