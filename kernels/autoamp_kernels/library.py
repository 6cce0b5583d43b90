"""The compiled library, loaded by ctypes. Needs neither torch nor a GPU."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from autoamp_kernels.abi import ABI, CHUNK, CUDA_ERROR, KERNELS, RESULTS, Args
from autoamp_kernels.errors import KernelError

__all__ = ["Library", "library", "load"]

LIBRARY = Path(__file__).with_name("libautoamp_kernels.so")


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
        self._loaded.ak_cuda_message.restype = ctypes.c_char_p
        self._loaded.ak_shared.restype = ctypes.c_int64
        self._loaded.ak_shared.argtypes = 2 * (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
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
            raise KernelError(f"kernel {name}: {self._reason(result)}")

    def shared(self, begins: int, sizes: int, count: int, written_begins: int, written_ends: int, written: int) -> int:
        """Return which piece of memory is the first that shares bytes with one that is written to; -1 for none.

        Args:
            begins: Where the addresses of the pieces lie, int64.
            sizes: Where their sizes in bytes lie, int64.
            count: How many they are.
            written_begins: Where the addresses of the written pieces lie, int64, ascending. None is empty, and each
                begins where the one before ends, or behind it.
            written_ends: Where the addresses behind their ends lie, int64.
            written: How many they are.
        """
        found: int = self._loaded.ak_shared(begins, sizes, count, written_begins, written_ends, written)
        return found

    def cuda_driver(self, path: str) -> None:
        """Load the CUDA driver.

        Raises:
            KernelError: It cannot be loaded, or lacks a function.
        """
        self._driver("ak_cuda_driver", path.encode())

    def cuda_version(self) -> int:
        """Return the version of CUDA that the driver speaks, such as 12010 for 12.1.

        Raises:
            KernelError: The driver failed, or was not loaded.
        """
        version = ctypes.c_int()
        self._driver("ak_cuda_version", ctypes.byref(version))
        return version.value

    def cuda_capabilities(self) -> list[int]:
        """Return the compute capability of each GPU, such as 90 for 9.0. This starts the driver.

        Raises:
            KernelError: The driver failed, or was not loaded.
        """
        count, capability = ctypes.c_int(), ctypes.c_int()
        self._driver("ak_cuda_devices", ctypes.byref(count))
        found = []
        for device in range(count.value):
            self._driver("ak_cuda_capability", device, ctypes.byref(capability))
            found.append(capability.value)
        return found

    def cuda_open(self, device: int, image: bytes) -> int:
        """Load an image of kernels for a GPU, for good; return what `Head.module` takes.

        Raises:
            KernelError: The driver refused it.
        """
        module = ctypes.c_void_p()
        self._driver("ak_cuda_open", device, image, ctypes.byref(module))
        return module.value or 0

    def _driver(self, function: str, *args: Any) -> None:
        result = getattr(self._loaded, function)(*args)
        if result:
            raise KernelError(self._message())

    def _message(self) -> str:
        return str(self._loaded.ak_cuda_message().decode(errors="replace"))

    def _reason(self, result: int) -> str:
        if result >= CUDA_ERROR:
            return self._message()
        return RESULTS.get(result, f"error {result}")


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
