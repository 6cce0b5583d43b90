"""The core's functions that return handles, as type checkers know them: with the handles that look on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, overload

import torch

from autoamp.core import LossScaler, OnNonfinite, Region, Scope
from autoamp.tools.handle import BaseHandle, Handle, NoOpHandle


class ByName(TypedDict, total=False):
    """The arguments of `init` that are given by name alone."""

    lists: Any
    device_type: str | None
    dtype: torch.dtype | Literal["fp16", "float16", "bf16", "bfloat16"] | None
    rebind: bool
    scope: Scope
    trace_overflow: bool
    capsule: str | Path | None
    on_nonfinite: OnNonfinite


if TYPE_CHECKING:
    # On a device without half units `init()` returns a NoOpHandle, which has the same members as a Handle.
    Scale: TypeAlias = float | Literal["dynamic"] | LossScaler | None

    @overload
    def init(
        enabled: Literal[True] = True, loss_scale: Scale = None, enable_caching: bool = True, verbose: bool = False,
        allow_banned: bool = True, **by_name: Unpack[ByName],
    ) -> Handle: ...  # fmt: skip
    @overload
    def init(
        enabled: Literal[False], loss_scale: Scale = None, enable_caching: bool = True, verbose: bool = False,
        allow_banned: bool = True, **by_name: Unpack[ByName],
    ) -> NoOpHandle: ...  # fmt: skip
    @overload
    def init(
        enabled: bool, loss_scale: Scale = None, enable_caching: bool = True, verbose: bool = False,
        allow_banned: bool = True, **by_name: Unpack[ByName],
    ) -> BaseHandle: ...  # fmt: skip
    def init(*args: Any, **kwargs: Any) -> Any:
        """Patch torch by the cast lists and return the handle that scales losses."""

    def region(
        enabled: bool = True, loss_scale: Scale = None, *, enable_caching: bool = True, verbose: bool = False,
        allow_banned: bool = True, **by_name: Unpack[ByName],
    ) -> Region[BaseHandle]:  # fmt: skip
        """Patch torch inside a ``with`` statement only."""

    def current_handle() -> Handle | None:
        """Return the active handle, None where torch is not patched."""

else:
    from autoamp.core import current_handle as current_handle
    from autoamp.core import init as init
    from autoamp.core import region as region
