"""The tree's `apex.parallel.optimized_sync_batchnorm`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.parallel import SyncBatchNorm

__getattr__ = missing_names(__name__)
