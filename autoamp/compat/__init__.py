"""The legacy surface: the module tree `apex`, and what legacy libraries need."""

from __future__ import annotations

from autoamp.compat.alias import install_as_apex, real_apex, uninstall
from autoamp.compat.fastai1 import watch as watch_fastai1

__all__ = ["install_as_apex", "real_apex", "uninstall", "watch_fastai1"]
