"""`FusedSGD` as `apex.contrib.optimizers` has it."""

from autoamp.apex.optimizers import FusedSGD
