"""Data parallelism with the signatures of `apex.parallel`, on `torch.distributed`."""

from __future__ import annotations

from autoamp.parallel import multiproc as multiproc
from autoamp.parallel.distributed import DistributedDataParallel as DistributedDataParallel
from autoamp.parallel.distributed import Reducer as Reducer
from autoamp.parallel.distributed import flat_dist_call as flat_dist_call
from autoamp.parallel.larc import LARC as LARC
from autoamp.parallel.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from autoamp.parallel.sync_batchnorm import convert_syncbn_model as convert_syncbn_model
from autoamp.parallel.sync_batchnorm import create_syncbn_process_group as create_syncbn_process_group
