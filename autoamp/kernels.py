"""The compiled kernels of the distribution `autoamp-kernels`: which of them can run, and how to call one.

Nothing needs them. Whoever has work that a kernel does asks `find` for it, and calls it by `attempt`; where either says
no, torch's own functions do the same work. ``AUTOAMP_KERNELS=0`` in the environment turns all of them off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp.torch_private import dispatch_modes

__all__ = ["Backend", "attempt", "backend", "backends", "by_kind", "find"]

_TAKEN = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Backend:
    """What does the work of a step on devices of one type.

    Attributes:
        device_type: Such as ``"cpu"``.
        kernels: Whether compiled kernels are used; torch's own functions are if not.
        reason: Which kernels, such as ``"avx512"``; without them why not, and what helps.
    """

    device_type: str
    kernels: bool
    reason: str

    def __str__(self) -> str:
        """Tell all that in a line."""
        return f"{self.device_type}: {'kernels' if self.kernels else 'no kernels'} ({self.reason})"


@functools.cache
def _package() -> Any:
    try:
        import autoamp_kernels
    except ImportError:
        return None
    return autoamp_kernels


def backends() -> tuple[Backend, ...]:
    """Return what there is to know of each type of device for which there are kernels at all."""
    package, missing = _package(), "pip install ./kernels` in autoamp's repository"
    if package is None or not hasattr(package, "backends"):
        reason = f"autoamp_kernels is {'not installed' if package is None else 'too old'}; `{missing}"
        return Backend("cpu", False, reason), Backend("cuda", False, reason)
    return tuple(Backend(one.device_type, bool(one.kernels), one.reason) for one in package.backends())


def backend(device_type: str) -> Backend:
    """Return what does the work of a step on devices of a type."""
    known = {one.device_type: one for one in backends()}
    return known.get(device_type) or Backend(device_type, False, "there are kernels for CPUs and CUDA alone")


@functools.cache
def _offered(device_type: str) -> dict[str, Callable[..., Any]]:
    package = _package()
    if not backend(device_type).kernels:
        return {}
    return {name: getattr(package, name) for one in package.backends() if one.device_type == device_type
            for name in one.kernels}  # fmt: skip


def find(name: str, device_type: str) -> Callable[..., Any] | None:
    """Return a kernel, such as ``"lamb_"``, for devices of a type; None where there is none.

    None also while torch compiles or a mode watches its operators: to both of them a kernel would be nothing.
    """
    # First, so that torch.compile does not look at the rest.
    if torch.compiler.is_compiling() or dispatch_modes():
        return None
    return _offered(device_type).get(name)


def attempt(kernel: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
    """Call a kernel, and tell whether it took these tensors. If not, nothing was written."""
    try:
        kernel(*args, **kwargs)
    except _package().ArgumentError:
        return False
    return True


def by_kind(
    name: str | None, *lists: Sequence[Tensor]
) -> Iterator[tuple[Callable[..., Any] | None, tuple[list[Tensor], ...]]]:
    """Yield parallel lists of tensors, sorted by what a kernel takes at once: of one device, and each of one dtype.

    Yields:
        The kernel of this name for tensors like these, None where there is none, and the lists.
    """
    kinds: dict[Any, list[tuple[Tensor, ...]]] = {}
    for row in zip(*lists, strict=True):
        kinds.setdefault((row[0].device, *[tensor.dtype for tensor in row]), []).append(row)
    for (device, *dtypes), rows in kinds.items():
        kernel = find(name, device.type) if name and all(dtype in _TAKEN for dtype in dtypes) else None
        yield kernel, tuple(list(column) for column in zip(*rows, strict=True))
