"""The tree's `apex.fused_dense`."""

from .fused_dense import *
