"""The tree's `apex.mlp`."""

from autoamp.compat.layers.mlp import MLP
