"""The compiled kernels of the distribution `autoamp-kernels`: which of them can run, and how to call one.

The kernels are optional. A caller gets one from `find` and calls it by `attempt`. If either fails, torch's functions do
the same work. ``AUTOAMP_KERNELS=0`` in the environment turns all of them off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp.torch_private import dispatch_modes

_TAKEN = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Backend:
    """What computes optimizer steps on devices of one type.

    Attributes:
        device_type: Such as ``"cpu"``.
        kernels: Whether compiled kernels are used. If not, torch's own functions are.
        reason: The kernels, such as ``"avx512"``; without kernels the reason and the remedy.
    """

    device_type: str
    kernels: bool
    reason: str

    def __str__(self) -> str:
        """Return all of it in one line."""
        return f"{self.device_type}: {'kernels' if self.kernels else 'no kernels'} ({self.reason})"


def _package() -> Any:
    try:
        import autoamp_kernels
    except ImportError:
        return None
    return autoamp_kernels


def backends() -> tuple[Backend, ...]:
    """Return the backend of each device type for which kernels exist."""
    package, missing = _package(), "pip install ./kernels` in autoamp's repository"
    if package is None or not hasattr(package, "backends"):
        reason = f"autoamp_kernels is {'not installed' if package is None else 'too old'}; `{missing}"
        return Backend("cpu", False, reason), Backend("cuda", False, reason)
    return tuple(Backend(one.device_type, bool(one.kernels), one.reason) for one in package.backends())


def backend(device_type: str) -> Backend:
    """Return the backend of a device type."""
    known = {one.device_type: one for one in backends()}
    return known.get(device_type) or Backend(device_type, False, "there are kernels for CPUs and CUDA only")


@functools.cache
def _offered(device_type: str) -> dict[str, Callable[..., Any]]:
    package = _package()
    if not backend(device_type).kernels:
        return {}
    return {name: getattr(package, name) for one in package.backends() if one.device_type == device_type
            for name in one.kernels}  # fmt: skip


def find(name: str, device_type: str) -> Callable[..., Any] | None:
    """Return a kernel, such as ``"lamb_"``, for devices of a type; None where there is none.

    Also None while torch compiles or a dispatch mode is active: neither could see into a kernel.
    """
    # First, so that torch.compile does not look at the rest.
    if torch.compiler.is_compiling() or dispatch_modes():
        return None
    return _offered(device_type).get(name)


def attempt(kernel: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
    """Call a kernel. Return False if it does not accept these tensors; then nothing was written."""
    try:
        kernel(*args, **kwargs)
    except _package().ArgumentError:
        return False
    return True


def by_kind(
    name: str | None, *lists: Sequence[Tensor]
) -> Iterator[tuple[Callable[..., Any] | None, tuple[list[Tensor], ...]]]:
    """Split parallel lists of tensors into groups that one kernel call accepts: one device, one dtype for each list.

    Yields:
        The kernel of this name for tensors like these, None where there is none, and the lists.
    """
    kinds: dict[Any, list[tuple[Tensor, ...]]] = {}
    for row in zip(*lists, strict=True):
        kinds.setdefault((row[0].device, *[tensor.dtype for tensor in row]), []).append(row)
    for (device, *dtypes), rows in kinds.items():
        kernel = find(name, device.type) if name and all(dtype in _TAKEN for dtype in dtypes) else None
        yield kernel, tuple(list(column) for column in zip(*rows, strict=True))
