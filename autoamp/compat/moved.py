"""Modules of autoamp 0.1 under the names that pickles of whole models, optimizers and scalers hold."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence

__all__ = ["find_moved_modules"]

_HERE = __name__.rpartition(".")[0]
_MOVED = {
    f"{_HERE}.{old}": f"{_HERE}.{new}"
    for old, new in {
        "attention": "layers.attention",
        "contrib": "layers.contrib",
        "early_optimizers": "early.optimizers",
        "early_scalers": "early.scalers",
        "mlp": "layers.mlp",
        "properties": "amp.properties",
        "rnn": "layers.rnn",
        "scaler": "amp.scaler",
        "state": "amp.state",
        "transducer": "layers.transducer",
        "vision": "layers.vision",
        "weight_norm": "layers.weight_norm",
    }.items()
}


class _MovedModules:
    """Finds the old names, and gives a module with all that the new one has; see `importlib.abc`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in _MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave the making of the module to Python."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Give a module the names of the one that has taken its place."""
        new = importlib.import_module(_MOVED[module.__name__])
        module.__dict__.update({name: value for name, value in vars(new).items() if not name.startswith("__")})


def find_moved_modules() -> None:
    """Let the old names be found from now on. ``import autoamp`` does it."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
