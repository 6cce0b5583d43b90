"""Data parallelism with the signatures of `apex.parallel`, on `torch.distributed`."""

from __future__ import annotations

from autoamp.parallel import multiproc
from autoamp.parallel.distributed import (
    DistributedDataParallel,
    Reducer,
    apply_flat_dist_call,
    flat_dist_call,
    split_by_type,
)
from autoamp.parallel.larc import LARC
from autoamp.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "apply_flat_dist_call",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "flat_dist_call",
    "multiproc",
    "split_by_type",
]
