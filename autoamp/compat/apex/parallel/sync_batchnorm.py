"""The tree's `apex.parallel.sync_batchnorm`."""

from autoamp.parallel import SyncBatchNorm
