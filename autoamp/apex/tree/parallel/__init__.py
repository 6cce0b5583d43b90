"""The tree's `apex.parallel`."""

from torch.distributed import ReduceOp

from autoamp.apex.parallel import (
    LARC,
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
