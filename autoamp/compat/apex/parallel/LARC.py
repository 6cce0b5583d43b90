"""The tree's `apex.parallel.LARC`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.parallel import LARC

__getattr__ = missing_names(__name__)
