"""The tree's `apex.amp.lists`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names

from . import functional_overrides, tensor_overrides, torch_overrides

__getattr__ = missing_names(__name__)
