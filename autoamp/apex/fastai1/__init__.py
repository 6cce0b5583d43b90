"""fastai v1 under mixed precision: its training loop follows the active handle, and its imports find what they need."""

from __future__ import annotations

from autoamp.apex.fastai1.shims import disable, enable
from autoamp.apex.fastai1.training import watch

__all__ = ["disable", "enable", "watch"]
