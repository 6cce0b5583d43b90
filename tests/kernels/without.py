"""How a test runs torch's functions in the place of compiled kernels."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class WithoutKernels(TorchDispatchMode):
    """Runs torch's operators as they are. No kernel runs in a dispatch mode, which could not see into it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
