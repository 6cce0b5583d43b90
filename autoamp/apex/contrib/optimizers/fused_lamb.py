"""`FusedLAMB` as `apex.contrib.optimizers` has it."""

from autoamp.apex.optimizers import FusedLAMB
