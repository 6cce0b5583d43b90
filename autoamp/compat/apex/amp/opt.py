"""The tree's `apex.amp.opt`."""

from autoamp.compat.amp.utils import OptimWrapper
