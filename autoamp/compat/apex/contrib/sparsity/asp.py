"""The tree's `apex.contrib.sparsity.asp`."""

from autoamp.compat.layers.sparsity import ASP
