"""The tree's `apex.contrib.optimizers.fused_lamb`."""

from autoamp.apex.optimizers import FusedLAMB
