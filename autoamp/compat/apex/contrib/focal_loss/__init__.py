"""The tree's `apex.contrib.focal_loss`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names

from . import focal_loss

__getattr__ = missing_names(__name__)
