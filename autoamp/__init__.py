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
import sys
from typing import TYPE_CHECKING, Any

from autoamp import moved

__version__ = "0.3.0"

# The public packages beside the names of `exports`.
_PACKAGES = ("compat", "diagnostics", "errors", "fp16_utils", "normalization", "optimizers", "parallel", "tools")
# What people look for who know torch.amp or apex.
_ELSEWHERE = {
    "GradScaler": "use handle.scale_loss(loss, optimizer), or torch.amp.GradScaler, which works under autoamp too",
    "amp": "autoamp has the functions of apex.amp itself: import autoamp as amp",
    "autocast": "use handle = autoamp.init(), or autoamp.region() around a part of the program",
}

moved.install()

if TYPE_CHECKING:
    # Files for type checkers alone; what runs is given by `moved`.
    from autoamp import compat as compat
    from autoamp import diagnostics as diagnostics
    from autoamp import errors as errors
    from autoamp import fp16_utils as fp16_utils
    from autoamp import normalization as normalization
    from autoamp import optimizers as optimizers
    from autoamp import parallel as parallel
    from autoamp import tools as tools
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
        message = f"module 'autoamp' has no attribute {name!r}"
        if name in _ELSEWHERE:
            message += f"; {_ELSEWHERE[name]}"
            # An AttributeError would be hidden by Python's own ImportError.
            if importlib.import_module("autoamp.apex.missing").is_import_from(sys._getframe(1)):
                raise ImportError(message, name="autoamp")
        raise AttributeError(message, name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted({*__getattr__("__all__"), *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
