"""The tree's `apex.mlp.mlp`."""

from autoamp.compat.layers.mlp import MLP, mlp_function
