"""The tree's `apex.contrib.optimizers.fused_lamb`."""

from autoamp.optimizers import FusedLAMB
