"""The tree's `apex.amp.lists`."""

from . import functional_overrides, tensor_overrides, torch_overrides
