"""The tree's `apex.mlp.mlp`."""

from autoamp.apex.layers.mlp import MLP, mlp_function
