"""Data parallelism with the signatures of `apex.parallel`, on `torch.distributed`."""

from __future__ import annotations

from autoamp.parallel.distributed import DistributedDataParallel, Reducer, flat_dist_call
from autoamp.parallel.larc import LARC
from autoamp.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "flat_dist_call",
]
