"""Images of the CUDA kernels, and the modules that a driver makes of them.

Two doors lead to one launcher: an image that nvcc made when the package was built, and images that NVRTC makes of the
same source at first use, one for each kernel and its dtypes. The first is taken where it has code for the card.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from autoamp_kernels import cache, nvrtc
from autoamp_kernels.abi import BF16, EXTRA_KERNELS, F16, F32, NO_DTYPE, Args
from autoamp_kernels.errors import KernelError
from autoamp_kernels.library import Library

__all__ = ["Images", "Modules", "Packaged", "unit_of", "ways"]

_LOG = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
DRIVER = "libcuda.so.1"
# Kernels have up to 32,764 bytes of parameters from CUDA 12.1 on.
OLDEST_DRIVER = 12010

_TYPES = {F32: ("F32", "f"), F16: ("F16", "h"), BF16: ("BF16", "b"), NO_DTYPE: ("Nothing", "n")}


def unit_of(kernel: str, args: Args) -> str:
    """Return what NVRTC compiles for a call: the macros that make its kernels, for the dtypes that it has."""
    codes = {name: getattr(args, name) for name, *_ in args._fields_ if name.endswith("_dtype")}
    makes = []
    for name, fields in ((kernel, tuple(codes)), *EXTRA_KERNELS.get(kernel, ())):
        types = [_TYPES[codes.get(field, NO_DTYPE)] for field in fields]
        makes.append(f"AK_MAKE_{name}({','.join(one for one, _ in types)},{''.join(letter for _, letter in types)})")
    return " ".join(makes)


class Packaged:
    """The image that nvcc made.

    Args:
        folder: Where ``kernels.fatbin`` lies, beside ``kernels.json``, which says what is in it.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._image = folder / "kernels.fatbin"
        self._contents = folder / "kernels.json"

    @cached_property
    def contents(self) -> dict[str, list[int]] | None:
        """The compute capabilities of machine code (``"code"``) and PTX (``"ptx"``) in it; None for no image."""
        try:
            read = json.loads(self._contents.read_text())
            return (
                {name: [int(one) for one in read[name]] for name in ("code", "ptx")} if self._image.is_file() else None
            )
        except (OSError, ValueError, KeyError):
            return None

    def covers(self, capability: int) -> bool:
        """Tell whether there is code for a card: of its own or an older minor version, or PTX of any older one."""
        if self.contents is None:
            return False
        code = any(one // 10 == capability // 10 and one <= capability for one in self.contents["code"])
        return code or any(one <= capability for one in self.contents["ptx"])

    def read(self) -> bytes:
        """Return the image."""
        return self._image.read_bytes()


class Images:
    """What NVRTC makes, kept on disk.

    Args:
        folder: Where the source, ``kernels.cu``, lies.
        compiler: Gives NVRTC, or raises KernelError.
    """

    def __init__(self, folder: Path = FOLDER, compiler: Callable[[], nvrtc.Compiler] = nvrtc.compiler) -> None:
        self._file = folder / "kernels.cu"
        self.compiler = compiler

    @cached_property
    def source(self) -> str:
        """The source, in one piece.

        Raises:
            KernelError: It is missing.
        """
        try:
            return self._file.read_text()
        except OSError as error:
            raise KernelError(f"{self._file} is missing; install autoamp-kernels by `pip install ./kernels`") from error

    def key(self, unit: str, capability: int, driver: int) -> tuple[object, ...]:
        """Return all that an image depends on."""
        return hashlib.sha256(self.source.encode()).hexdigest(), unit, capability, driver, self.compiler().version

    def image(self, unit: str, capability: int, driver: int) -> bytes:
        """Return the image of a unit, compiled now unless it was before.

        Raises:
            KernelError: There is no NVRTC, or it refused.
        """
        return cache.cached(
            f"sm_{capability}", self.key(unit, capability, driver),
            lambda: self.compiler().compile(self.source, "autoamp_kernels.cu", capability, [f"-DAK_ONE={unit}"]),
        )  # fmt: skip

    def forget(self, unit: str, capability: int, driver: int) -> None:
        """Delete an image that the driver refuses."""
        cache.forget(f"sm_{capability}", self.key(unit, capability, driver))


class Modules:
    """The modules of a process: images that the driver has loaded, for each GPU.

    Args:
        library: The compiled library.
        packaged: The image of nvcc.
        images: Those of NVRTC.
        driver: The driver's file.

    Raises:
        KernelError: There is no driver, no GPU, or the driver is too old.
    """

    def __init__(
        self, library: Library, packaged: Packaged | None = None, images: Images | None = None, driver: str = DRIVER
    ) -> None:
        self._library, self._lock = library, threading.Lock()
        self._packaged, self._images = packaged or Packaged(), images or Images()
        self._opened: dict[tuple[int, str], int] = {}
        self._whole: dict[int, int | None] = {}
        self.version, self.capabilities = started(library, driver)

    def opened(self, device: int, unit: str) -> int | None:
        """Return the module that has a unit's kernels, None if none was opened yet."""
        return self._opened.get((device, unit))

    def open(self, device: int, unit: str) -> int:
        """Return the module that has a unit's kernels; compiles and loads it if need be.

        Raises:
            KernelError: Both doors are closed. The message says why.
        """
        with self._lock:
            key = device, unit
            if key not in self._opened:
                if device not in self._whole:
                    self._whole[device] = self._open_packaged(device)
                self._opened[key] = self._whole[device] or self._open_compiled(device, unit)
            return self._opened[key]

    def _open_packaged(self, device: int) -> int | None:
        if not self._packaged.covers(self.capabilities[device]):
            return None
        try:
            return self._library.cuda_open(device, self._packaged.read())
        except (KernelError, OSError) as error:
            # Such as a driver that is older than nvcc.
            _LOG.info("the kernels that nvcc compiled cannot be loaded (%s); they are compiled by NVRTC", error)
            return None

    def _open_compiled(self, device: int, unit: str) -> int:
        capability = self.capabilities[device]
        try:
            return self._library.cuda_open(device, self._images.image(unit, capability, self.version))
        except KernelError as error:
            # The driver may refuse what lay on the disk; a fresh one gets one chance.
            self._images.forget(unit, capability, self.version)
            _LOG.info("made again: %s", error)
        return self._library.cuda_open(device, self._images.image(unit, capability, self.version))


def started(library: Library, driver: str = DRIVER) -> tuple[int, list[int]]:
    """Start the driver; return the version of CUDA that it speaks and the compute capability of each GPU.

    Raises:
        KernelError: There is no driver, no GPU, or the driver is too old. The message says what to do.
    """
    try:
        library.cuda_driver(driver)
    except KernelError as error:
        raise KernelError(f"no driver: {error}; install NVIDIA's driver") from error
    version = library.cuda_version()
    if version < OLDEST_DRIVER:
        raise KernelError(
            f"the driver is too old: it speaks CUDA {version // 1000}.{version % 1000 // 10}, the kernels need 12.1; "
            "install NVIDIA's driver 530 or later"
        )
    try:
        capabilities = library.cuda_capabilities()
    except KernelError as error:
        raise KernelError(f"no GPU: {error}") from error
    if not capabilities:
        raise KernelError("no GPU: the driver finds none; look at CUDA_VISIBLE_DEVICES")
    return version, capabilities


def ways(
    library: Library, packaged: Packaged | None = None, images: Images | None = None, driver: str = DRIVER
) -> dict[str, tuple[bool, str]]:
    """Return of each CUDA door whether it is open, and why not, or what is behind it."""
    try:
        _, capabilities = started(library, driver)
    except KernelError as error:
        return {"nvcc": (False, str(error)), "nvrtc": (False, str(error))}
    packaged, images = packaged or Packaged(), images or Images()
    cards = ", ".join(f"{one / 10}" for one in sorted(set(capabilities)))
    return {"nvcc": _way_of_nvcc(packaged, capabilities, cards), "nvrtc": _way_of_nvrtc(images, capabilities, cards)}


def _way_of_nvcc(packaged: Packaged, capabilities: list[int], cards: str) -> tuple[bool, str]:
    if packaged.contents is None:
        return (
            False,
            "not installed: the package was built without nvcc; put it on PATH or set CUDA_HOME, and reinstall",
        )
    if not any(map(packaged.covers, capabilities)):
        known = ", ".join(f"{one / 10}" for one in packaged.contents["code"])
        return False, f"no code for this card: it has compute capability {cards}, the package {known}; use NVRTC"
    return True, f"nvcc, compute capability {cards}"


def _way_of_nvrtc(images: Images, capabilities: list[int], cards: str) -> tuple[bool, str]:
    try:
        compiler = images.compiler()
        _ = images.source
    except KernelError as error:
        return False, f"not installed: {error}"
    version = ".".join(map(str, compiler.version))
    if min(compiler.capabilities) > max(capabilities):
        return False, f"no code for this card: it has compute capability {cards}, NVRTC {version} knows only later ones"
    return True, f"NVRTC {version}, compute capability {cards}, kept in {cache.folder()}"
