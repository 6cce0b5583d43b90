"""The tree's `apex.parallel`."""

from torch.distributed import ReduceOp

from autoamp.parallel import LARC as _LARC
from autoamp.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

from . import LARC as _module_of_larc
from . import distributed, optimized_sync_batchnorm, sync_batchnorm

# The class, as Apex had it; the module of the same name is imported by its full path.
LARC = _LARC
