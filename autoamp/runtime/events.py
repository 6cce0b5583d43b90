"""What happens to handles, for parts of the package that come and go with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Event", "activated", "suspended"]


class Event:
    """Something that happens to handles, again and again. Listeners are called with the handle, in their order."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Any], object]] = []

    def listen(self, listener: Callable[[Any], object]) -> Callable[[], None]:
        """Call ``listener(handle)`` each time from now on; return what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def tell(self, handle: Any) -> None:
        """Call the listeners. What one of them raises goes on."""
        for listener in list(self._listeners):
            listener(handle)


activated = Event()
"""A handle's patches were put in place: by `init`, `initialize` or at the beginning of a region."""

suspended = Event()
"""A handle's patches are about to be taken back, for a while or for good."""
