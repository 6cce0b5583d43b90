"""The tree's `apex.amp.opt`."""

from autoamp.apex.amp.utils import OptimWrapper
