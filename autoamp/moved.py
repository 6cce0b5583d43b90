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

# The old name below `autoamp`, and the new one; or several, where the classes of a file are in several now. What lies
# below an old name lies below the new one, unless it is here.
MOVED: dict[str, str] = {
    "compat": "apex",
    "compat.amp.api": "apex.amp.frontend",
    "compat.amp.listed": "apex.amp.lists",
    "compat.amp.state": "apex.amp.handle apex.amp.scaler apex.amp._amp_state",
    "compat.amp.unscaling": "apex.amp.scaler",
    "compat.apex": "apex",
    "compat.early": "apex.fp16_utils",
    "compat.early.optimizers": "apex.fp16_utils.fp16_optimizer apex.contrib.optimizers.fused_adam",
    "compat.early.scalers": "apex.fp16_utils.loss_scaler",
    "compat.layers": "apex.contrib",
    "compat.layers.contrib": "apex.contrib.clip_grad.clip_grad apex.contrib.layer_norm.layer_norm "
    "apex.contrib.xentropy.softmax_xentropy",
    "compat.layers.mlp": "apex.mlp.mlp apex.fused_dense.fused_dense",
    "compat.layers.norm_functions": "apex.normalization.fused_layer_norm apex.contrib.layer_norm.layer_norm",
    "compat.layers.rnn": "apex.RNN.models",
    "compat.layers.weight_norm": "apex.reparameterization.weight_norm",
    "compat.multi_tensor": "apex.amp_C",
    "compat.multi_tensor.tensor_lists": "apex.amp_C.tensor_lists apex.multi_tensor_apply.multi_tensor_apply",
    "compat.pyprof": "apex.pyprof.nvtx",
    "diagnostics": "tools",
    "formulas": "apex.formulas",
    "fp16_utils": "apex.fp16_utils",
    "fp16_utils.loss_scalers": "apex.fp16_utils.loss_scaler",
    "fp16_utils.models": "apex.fp16_utils.fp16util",
    "levels": "apex.initialize apex.levels",
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
    "rules": "core",
    "runtime": "core",
    "scaling": "core",
    "scaling.loss_scale": "core.loss_scale",
    "parallel.larc": "apex.parallel.LARC",
}


def _new_name(old: str) -> str:
    """Return the new name of an old one below `autoamp`; an empty string for one that has not moved."""
    below = ""
    while old and old not in MOVED:
        old, _, last = old.rpartition(".")
        below = f".{last}{below}"
    return f"{MOVED[old]}{below}" if old else ""


# ``from autoamp.optimizers import adam`` looks below the new name of the package. Below `compat` nothing was public.
for _old, _new in list(MOVED.items()):
    _package, _, _file = _old.rpartition(".")
    if _package and not _old.startswith("compat.") and f"{MOVED[_package]}.{_file}" != _new:
        MOVED[f"{MOVED[_package]}.{_file}"] = _new


class SameModule(importlib.abc.Loader):
    """Gives the module of another name itself, and imports it first if it is not imported yet.

    Args:
        spec: The spec of the other name.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Import the module."""
        self.alias = spec.name
        return importlib.import_module(self._spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module back its spec: the import system has written the one of this name over it."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Return the module's code, which ``python -m`` runs."""
        loader: Any = self._spec.loader
        code: types.CodeType | None = loader.get_code(self._spec.name)
        return code


def same_as(fullname: str, spec: ModuleSpec, loader: SameModule | None = None) -> ModuleSpec:
    """Return a spec by which ``import fullname`` gives the module of another spec."""
    found = ModuleSpec(fullname, loader or SameModule(spec), origin=spec.origin)
    found.submodule_search_locations = spec.submodule_search_locations
    return found


class _Joined(importlib.abc.Loader):
    """Makes a module of the names of several."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module what the others have."""
        for name in self._names:
            found = vars(importlib.import_module(name)).items()
            vars(module).update({entry: value for entry, value in found if not entry.startswith("__")})


class _MovedFinder(importlib.abc.MetaPathFinder):
    """Finds modules by their old names. It comes before the finder that would look into the folder of the parent."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec on the module of the new name; None for a name that has not moved."""
        top, _, old = fullname.partition(".")
        names = [f"autoamp.{name}" for name in _new_name(old).split()] if top == "autoamp" else []
        if len(names) > 1:
            return ModuleSpec(fullname, _Joined(names), is_package=True)
        spec = importlib.util.find_spec(names[0]) if names else None
        return None if spec is None else same_as(fullname, spec)


def install() -> None:
    """Let old names be imported."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedFinder())
