"""The tree's `apex.optimizers.fused_novograd`."""

from autoamp.apex.optimizers import FusedNovoGrad
