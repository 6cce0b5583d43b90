"""The tree's `apex.optimizers.fused_lamb`."""

from autoamp.apex.optimizers import FusedLAMB
