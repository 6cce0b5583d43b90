"""The tree's `apex.parallel.sync_batchnorm`."""

from autoamp.apex.parallel import SyncBatchNorm
