"""The tree's `apex.parallel.optimized_sync_batchnorm`."""

from autoamp.apex.parallel import SyncBatchNorm
