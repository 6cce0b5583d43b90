"""`SyncBatchNorm`, by the file of Apex's faster one."""

from autoamp.apex.parallel.sync_batchnorm import SyncBatchNorm
