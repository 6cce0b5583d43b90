"""The tree's `apex.optimizers.fused_novograd`."""

from autoamp.optimizers import FusedNovoGrad
