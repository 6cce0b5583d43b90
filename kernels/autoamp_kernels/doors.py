"""Which doors to the kernels are open, and why the others are closed. Needs neither torch nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from autoamp_kernels import cuda
from autoamp_kernels.errors import KernelError
from autoamp_kernels.library import load

__all__ = ["Door", "doors"]


@dataclass(frozen=True)
class Door:
    """A way to the kernels.

    Attributes:
        name: The type of the devices behind it, ``"cpu"`` or ``"cuda"``.
        way: ``"cpu"``; ``"nvcc"``, the kernels for GPUs that were compiled when the package was built; or ``"nvrtc"``,
            the same, compiled at first use.
        open: Whether kernels can run there.
        reason: Why it is closed, with a remedy; of an open door, what runs there, such as ``"avx512"``.
    """

    name: str
    way: str
    open: bool
    reason: str


def doors() -> tuple[Door, ...]:
    """Return all doors, open ones and closed ones. This starts the CUDA driver, where there is one."""
    found = load()
    if isinstance(found, KernelError):
        return tuple(Door(*names, False, str(found)) for names in (("cpu", "cpu"), ("cuda", "nvcc"), ("cuda", "nvrtc")))
    ways = cuda.ways(found)
    return (
        Door("cpu", "cpu", True, found.cpu_variant),
        *(Door("cuda", way, is_open, reason) for way, (is_open, reason) in ways.items()),
    )
