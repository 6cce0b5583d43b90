"""The one door to compiled kernels, those of the distribution `autoamp-kernels`: which are open, and how to call one.

Nothing needs them. Whoever has work that a kernel does asks `opened` for the package, and tries it by `attempt`; where
either says no, torch's own functions do the same work. ``AUTOAMP_KERNELS=0`` in the environment closes all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Backend", "attempt", "backend", "backends", "by_kind", "opened"]

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
    package = _package()
    if package is None:
        reason = "autoamp_kernels is not installed; `pip install ./kernels` in autoamp's repository"
        return Backend("cpu", False, reason), Backend("cuda", False, reason)
    doors: dict[str, list[Any]] = {}
    for door in package.doors():
        doors.setdefault(door.name, []).append(door)
    found = []
    for name, ways in doors.items():
        way = next((door for door in ways if door.open), ways[0])
        found.append(Backend(name, way.open, way.reason))
    return tuple(found)


def backend(device_type: str) -> Backend:
    """Return what does the work of a step on devices of a type."""
    known = {one.device_type: one for one in backends()}
    return known.get(device_type) or Backend(device_type, False, "there are kernels for CPUs and CUDA alone")


@functools.cache
def opened(device_type: str) -> Any:
    """Return the package `autoamp_kernels` if it has kernels that run on devices of a type, else None."""
    return _package() if backend(device_type).kernels else None


def attempt(kernel: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
    """Call a kernel, and tell whether it took these tensors. If not, nothing was written."""
    try:
        kernel(*args, **kwargs)
    except _package().ArgumentError:
        return False
    return True


def by_kind(*lists: Sequence[Tensor]) -> Iterator[tuple[Any, tuple[list[Tensor], ...]]]:
    """Yield parallel lists of tensors, sorted by what a kernel takes at once: of one device, and each of one dtype.

    Yields:
        The package of kernels for tensors like these, None where there is none, and the lists.
    """
    kinds: dict[Any, list[tuple[Tensor, ...]]] = {}
    for row in zip(*lists, strict=True):
        kinds.setdefault((row[0].device, *[tensor.dtype for tensor in row]), []).append(row)
    for (device, *dtypes), rows in kinds.items():
        package = opened(device.type) if all(dtype in _TAKEN for dtype in dtypes) else None
        yield package, tuple(list(column) for column in zip(*rows, strict=True))
