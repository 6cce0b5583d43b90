"""Data parallelism with the signatures of `apex.parallel`, on `torch.distributed`."""

from torch.distributed import ReduceOp

from autoamp.apex.parallel import multiproc as multiproc
from autoamp.apex.parallel.distributed import DistributedDataParallel as DistributedDataParallel
from autoamp.apex.parallel.distributed import Reducer as Reducer
from autoamp.apex.parallel.distributed import flat_dist_call as flat_dist_call
from autoamp.apex.parallel.LARC import LARC as LARC
from autoamp.apex.parallel.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from autoamp.apex.parallel.sync_batchnorm import convert_syncbn_model as convert_syncbn_model
from autoamp.apex.parallel.sync_batchnorm import create_syncbn_process_group as create_syncbn_process_group
