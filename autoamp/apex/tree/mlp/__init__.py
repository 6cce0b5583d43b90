"""The tree's `apex.mlp`."""

from autoamp.apex.layers.mlp import MLP
