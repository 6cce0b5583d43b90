"""NVRTC, the compiler of CUDA that is a library: found beside torch or in the system, and called by ctypes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autoamp_kernels.errors import KernelError

__all__ = ["Compiler", "compiler"]


class Compiler:
    """NVRTC.

    Args:
        path: The library's file, or its name for the system's search.

    Raises:
        KernelError: It cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # It asks for its second half by name alone; loaded before, that one is found.
            for half in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")) if "/" in path else ():
                ctypes.CDLL(str(half))
            self._library = ctypes.CDLL(path)
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
            count = ctypes.c_int()
            self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
            capabilities = (ctypes.c_int * count.value)()
            self._call("nvrtcGetSupportedArchs", capabilities)
        except (OSError, AttributeError) as error:
            raise KernelError(
                f"{path} cannot be loaded: {error}; `pip install --force-reinstall` its package"
            ) from error
        self.version = (major.value, minor.value)
        self.capabilities = tuple(capabilities)

    def compile(self, source: str, name: str, capability: int, options: Sequence[str] = ()) -> bytes:
        """Compile a source for one kind of card.

        Args:
            source: CUDA C++ that includes nothing.
            name: What messages call it.
            capability: The card's compute capability, such as 90 for 9.0. For a card that this NVRTC does not know the
                result is PTX of the latest older one, which the driver compiles.
            options: More options.

        Returns:
            A cubin or PTX, as the driver loads it.

        Raises:
            KernelError: It does not compile, or the card is older than any that this NVRTC knows.
        """
        older = [known for known in self.capabilities if known <= capability]
        if not older:
            raise KernelError(
                f"NVRTC {self.version[0]}.{self.version[1]} has no code for compute capability {capability / 10}, only "
                f"from {min(self.capabilities) / 10} on; install an older nvidia-cuda-nvrtc"
            )
        exact = max(older) == capability
        target = f"sm_{capability}" if exact else f"compute_{max(older)}"
        given = [f"--gpu-architecture={target}", "--std=c++17", "--fmad=false", *options]
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            strings = (ctypes.c_char_p * len(given))(*(one.encode() for one in given))
            if self._library.nvrtcCompileProgram(program, len(given), strings):
                log = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
                raise KernelError(f"NVRTC {self.version[0]}.{self.version[1]} cannot compile {name}: {log[:2000]}")
            return self._output(program, "CUBIN" if exact else "PTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *args: Any) -> None:
        function = getattr(self._library, name)
        result = function(*args)
        if result:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise KernelError(f"{name} failed: {self._library.nvrtcGetErrorString(result).decode()}")


def _files() -> Iterator[str]:
    """Yield where NVRTC may lie: what the environment names, the wheels of torch's CUDA, the system."""
    given = os.environ.get("AUTOAMP_KERNELS_NVRTC")
    if given:
        yield given
        return
    spec = importlib.util.find_spec("nvidia")
    for place in (spec and spec.submodule_search_locations) or ():
        for pattern in ("cu*/lib", "cuda_nvrtc/lib"):
            found = [
                path for path in Path(place).glob(f"{pattern}/libnvrtc.so*") if re.search(r"\.so\.\d+$", path.name)
            ]
            yield from map(str, sorted(found, reverse=True))
    for home in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda")):
        yield from map(str, sorted(Path(home).glob("lib64/libnvrtc.so.??")))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12")


@functools.cache
def compiler() -> Compiler:
    """Return NVRTC.

    Raises:
        KernelError: It is not installed.
    """
    problems = []
    for path in _files():
        try:
            return Compiler(path)
        except KernelError as error:
            problems.append(str(error))
    raise KernelError(
        "NVRTC was not found; torch's CUDA wheels bring it, or else `pip install nvidia-cuda-nvrtc`"
        + (f" ({problems[0]})" if os.environ.get("AUTOAMP_KERNELS_NVRTC") else "")
    )
