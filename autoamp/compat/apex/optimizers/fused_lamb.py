"""The tree's `apex.optimizers.fused_lamb`."""

from autoamp.optimizers import FusedLAMB
