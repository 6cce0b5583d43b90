"""The legacy surface: the module tree `apex`, and what legacy libraries need to run."""

from __future__ import annotations

from autoamp.compat.alias import install_as_apex, uninstall

__all__ = ["install_as_apex", "uninstall"]
