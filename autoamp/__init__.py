"""Mixed precision for PyTorch: patches torch by declarative cast lists, scales losses, guards optimizer steps.

The lists decide which ops run in half precision, which in fp32 and which promote their arguments:

    handle = autoamp.init()
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from autoamp import moved

__version__ = "0.2.0"

moved.install()

if TYPE_CHECKING:
    # Files for type checkers alone; what runs is given by `moved`.
    from autoamp import compat as compat
    from autoamp import fp16_utils as fp16_utils
    from autoamp import normalization as normalization
    from autoamp import optimizers as optimizers
    from autoamp import parallel as parallel
    from autoamp.exports import *
else:

    def __getattr__(name: str) -> Any:
        """Import a package or a public name when it is first asked for: `import autoamp` by itself imports no torch."""
        if name == "__all__" or not name.startswith("_"):
            if importlib.util.find_spec(f"autoamp.{name}") is not None:
                return importlib.import_module(f"autoamp.{name}")
            exports = vars(importlib.import_module("autoamp.exports"))
            if name == "__all__":
                return sorted(one for one in exports if not one.startswith("_") and one != "annotations")
            if name in exports:
                return globals().setdefault(name, exports[name])
        raise AttributeError(f"module 'autoamp' has no attribute {name!r}")

    def __dir__() -> list[str]:
        packages = ("compat", "fp16_utils", "normalization", "optimizers", "parallel")
        return sorted({*globals(), *packages, *__getattr__("__all__")})
