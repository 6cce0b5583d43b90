"""Which doors to the kernels are open, and why the others are closed. Needs neither torch nor a GPU."""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoamp_kernels.abi import ABI, CHUNK, CUDA_ERROR, KERNELS, RESULTS, Args
from autoamp_kernels.errors import KernelError

__all__ = ["Door", "Library", "doors", "library", "load"]

LIBRARY = Path(__file__).with_name("libautoamp_kernels.so")


@dataclass(frozen=True)
class Door:
    """A way to the kernels.

    Attributes:
        name: ``"cpu"`` or ``"cuda"``.
        open: Whether kernels can run there.
        reason: Why it is closed, with a remedy; of an open door, what runs there, such as ``"avx512"``.
    """

    name: str
    open: bool
    reason: str


class Library:
    """The compiled library.

    Args:
        path: The file.

    Raises:
        KernelError: It cannot be loaded, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._loaded = ctypes.CDLL(str(path))
            version, chunk = self._loaded.ak_abi(), self._loaded.ak_chunk()
        except (OSError, AttributeError) as error:
            raise KernelError(f"{path} cannot be loaded: {error}; reinstall autoamp-kernels") from error
        if (version, chunk) != (ABI, CHUNK):
            raise KernelError(f"{path} has version {version}, not {ABI}; reinstall autoamp-kernels")
        self._loaded.ak_cpu_variant.restype = ctypes.c_char_p
        self._functions: dict[str, Any] = {name: getattr(self._loaded, f"ak_{name}") for name in KERNELS}

    @property
    def cpu_variant(self) -> str:
        """What runs on the CPU: ``"avx512"``, ``"avx2"`` or ``"plain"``."""
        return str(self._loaded.ak_cpu_variant().decode())

    def use_cpu_variant(self, name: str) -> None:
        """Run another variant on the CPU from now on. All of them give the same bits.

        Raises:
            KernelError: This CPU cannot run it, or there is none of this name.
        """
        if self._loaded.ak_use_cpu_variant(name.encode()):
            raise KernelError(f"there is no variant {name!r} that this CPU runs; choose 'plain', 'avx2' or 'avx512'")

    def call(self, name: str, args: Args) -> None:
        """Run a kernel.

        Raises:
            KernelError: The library or the device refused it. The message names the kernel.
        """
        result = self._functions[name](ctypes.byref(args))
        if result:
            reason = RESULTS.get(result, f"error {result}")
            if result >= CUDA_ERROR:
                reason = f"CUDA error {result - CUDA_ERROR}"
            raise KernelError(f"kernel {name}: {reason}")


@functools.cache
def load() -> Library | KernelError:
    """Return the installed library, or why there is none."""
    if os.environ.get("AUTOAMP_KERNELS") == "0":
        return KernelError("the kernels are turned off by AUTOAMP_KERNELS=0; unset it")
    path = Path(os.environ.get("AUTOAMP_KERNELS_LIBRARY", LIBRARY))
    if not path.is_file():
        return KernelError(f"{path} is missing; install autoamp-kernels by `pip install ./kernels`")
    try:
        return Library(path)
    except KernelError as error:
        return error


def library() -> Library:
    """Return the installed library.

    Raises:
        KernelError: There is none, or it is turned off.
    """
    found = load()
    if isinstance(found, KernelError):
        raise KernelError(str(found))
    return found


def doors() -> tuple[Door, ...]:
    """Return all doors, open ones and closed ones."""
    found = load()
    if isinstance(found, KernelError):
        return Door("cpu", False, str(found)), Door("cuda", False, str(found))
    return Door("cpu", True, found.cpu_variant), Door("cuda", False, "this build has no kernels for CUDA")
