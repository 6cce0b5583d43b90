"""The tree's `apex.parallel.distributed`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.parallel import DistributedDataParallel, Reducer, apply_flat_dist_call, flat_dist_call, split_by_type

__getattr__ = missing_names(__name__)
