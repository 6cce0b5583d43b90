"""The legacy surface: the module tree `apex`, and what legacy libraries need."""

from __future__ import annotations

from autoamp.compat.alias import added_to_real_apex, explain_real_apex, install_as_apex, real_apex, uninstall
from autoamp.compat.fastai1 import watch as watch_fastai1

__all__ = [
    "added_to_real_apex", "explain_real_apex", "install_as_apex", "real_apex", "uninstall", "watch_fastai1",
]  # fmt: skip
