"""The handle of ``amp.init`` by the names of Apex."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from autoamp import core
from autoamp.apex.initialize import scale_loss
from autoamp.core import current_handle, disable_casts


class AmpHandle:
    """The handle of the old API, by its names; all other names are those of `autoamp.Handle`.

    Args:
        handle: What `autoamp.init` returned.
        verbose: As given to ``amp.init``.
    """

    def __init__(self, handle: core.BaseHandle, verbose: bool = False) -> None:
        self._handle = handle
        self.verbose = verbose

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give the optimizer a ``scale_loss`` of its own; see `autoamp.Handle.wrap_optimizer`."""
        return self._handle.wrap_optimizer(optimizer, num_loss)

    @property
    def has_cache(self) -> bool:
        """Whether casts of parameters are kept while a module call runs."""
        return self._handle.is_active() and self._handle.cache.enabled

    def remove_cache(self, param: Tensor) -> None:
        """Drop the cast of a parameter, and with it all others: each is made again at its next use."""
        self._handle.cache.clear()

    def _clear_cache(self) -> None:
        self._handle.cache.clear()

    def _deactivate(self) -> None:
        self._handle.deactivate()

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return self._handle.disable_casts()

    def __getattr__(self, name: str) -> Any:
        if name == "_handle":
            raise AttributeError(name)
        return getattr(self._handle, name)


class NoOpHandle(AmpHandle):
    """The handle of ``init(enabled=False)``: the surface of the other, with nothing behind it."""

    def __init__(self) -> None:
        super().__init__(core.handles.disabled())


def amp_handle() -> AmpHandle | None:
    """Return the active handle by the names of Apex, None before ``amp.init``, `autoamp.init` and the like."""
    handle = current_handle()
    return AmpHandle(handle, handle.settings.verbose) if handle is not None else None
