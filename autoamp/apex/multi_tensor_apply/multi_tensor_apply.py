"""`MultiTensorApply`, which calls the functions of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autoamp.apex.amp_C.tensor_lists import TensorLists


class MultiTensorApply:
    """Calls a multi-tensor function with a chunk size.

    Args:
        chunk_size: What the functions are called with; it has no effect.

    Attributes:
        available: Always True.
        import_err: Always None: nothing has to be built.
    """

    available = True
    import_err: Exception | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing. Apex raised here where its extension was not built."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: TensorLists, *args: Any) -> Any:
        """Return ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
