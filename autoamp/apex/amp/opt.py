"""The optimizer of ``handle.wrap_optimizer``."""

from __future__ import annotations

from typing import Any


class OptimWrapper:
    """An optimizer with a ``scale_loss`` of its own, as ``handle.wrap_optimizer`` returned it in Apex.

    Args:
        optimizer: Any optimizer.
        amp_handle: The handle of ``amp.init``.
        num_loss: How many losses there are between two steps.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int = 1) -> None:
        self._optimizer = amp_handle.wrap_optimizer(optimizer, num_loss)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)
