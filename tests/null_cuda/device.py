"""A CUDA device that computes nothing, for machines that have none.

`environment()` compiles a stand-in for the CUDA runtime, cuBLAS, cuDNN and the rest, once, into the user's cache, and
returns the environment in which a process finds it in their place. It needs a CUDA build of torch, whose wheel brings
the headers, `cc` and `nm`.

Memory is the host's, copies copy and fills fill; kernels and libraries only count. All above them is real: the
dispatcher with the autocast of CUDA, the checks of dtypes in the host code of each kernel, autograd's thread of the
device. So dtypes, exceptions, launches, copies, waits and memory are what a GPU gives. Values are not: whatever a
kernel would have written is 0 or what lay there.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCES = [Path(__file__).with_name(name) for name in ("cuda.c", "cudnn.c")]

# What the CUDA headers include from a package of their own.
HOST_DEFINES = """
#define __device_builtin__
#define __cuda_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __host__
#define __device__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __location__(a)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __CUDA_DEPRECATED
#define CUDART_DEVICE
"""

# The driver, which torch loads to ask whether the device has a context.
DRIVER = {
    "cuDevicePrimaryCtxGetState": "int {0}(int d, unsigned *f, int *a) {{ *f = 0; *a = 1; return 0; }}",
    "cuCtxGetCurrent": "int {0}(void **c) {{ *c = (void *)16; return 0; }}",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "int {0}(int *n) {{ *n = 2; return 0; }}",
    "cuModuleLoadData": "int {0}(void **m) {{ *m = (void *)16; return 0; }}",
    "cuModuleGetFunction": "int {0}(void **f) {{ *f = (void *)16; return 0; }}",
    # Kernels that are compiled at run time.
    "cuLaunchKernel": 'int {0}() {{ null_count(0, "compiled", 0); return 0; }}',
}
OF_CUDA = re.compile(r"^(_*cuda[A-Z]|cu[A-Z]|cublas|cudnn|cufft|cusparse|cusolver|curand)")
# What the true libraries answer without a device.
KEPT = re.compile(r"GetVersion|GetErrorString|GetLastErrorString|GetProperty|GetCudartVersion|^cuFile")
# What does no work on the device, and so is not counted.
QUIET = re.compile(r"^cuda|Set|Get|Destroy|Descriptor|bufferSize|Init")


class CannotBuildError(Exception):
    """What the device needs is missing here."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call cost: numbers, and the most bytes that were held at once, in the allocator's units of 512.

    Attributes:
        launches: Kernels of torch's own.
        library: Calls of cuBLAS, cuDNN and their kin that launch kernels of theirs.
        copies: Copies between host and device and within the device, those of ``cudaMemcpy``.
        waits: How often the host waited for a stream, an event or the device.
        peak: Bytes.
    """

    launches: int
    library: int
    copies: int
    waits: int
    peak: int


def environment(cache: Path | None = None) -> dict[str, str]:
    """Return the environment in which a process finds the device, which is built the first time.

    Raises:
        CannotBuildError: The message says what is missing.
    """
    library = _built(cache or Path.home() / ".cache" / "autoamp_null_cuda") / "libnull.so"
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "NULL_CUDA": str(library),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Each block is fresh and 0, so that no flag has another tensor's bits; the device counts bytes itself.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
        # cuDNN's older interface, which needs no engine; and no kernels that Triton would compile.
        "TORCH_CUDNN_V8_API_DISABLED": "1",
        "TORCH_DISABLE_NATIVE_JIT": "1",
    }


def obstacle() -> str:
    """Return why this process does not run on the device; empty where it does."""
    if "NULL_CUDA" in os.environ:
        return ""
    try:
        environment()
    except CannotBuildError as reason:
        return f"the null device cannot be built here: {reason}"
    return "not under the null device; run `python -m tests.null_cuda`"


def spent(run: Callable[[], object]) -> Cost:
    """Return what ``run()`` cost."""
    library = ctypes.CDLL(os.environ["NULL_CUDA"])
    library.null_reset_peak()
    before = _counts(library)
    run()
    after = _counts(library)
    launches, calls, h2d, d2h, d2d, _, stream, event, device, *_ = (b - a for a, b in zip(before, after, strict=True))
    return Cost(launches, calls, h2d + d2h + d2d, stream + event + device, _memory(library)[1])


def held() -> int:
    """Return how many bytes are held now."""
    return _memory(ctypes.CDLL(os.environ["NULL_CUDA"]))[0]


def journal(path: Path, run: Callable[[], object]) -> list[str]:
    """Return a line for each thing that ``run()`` made the device do: its kind, its name and its size in bytes."""
    library = ctypes.CDLL(os.environ["NULL_CUDA"])
    library.null_journal(str(path).encode())
    try:
        run()
    finally:
        library.null_journal(None)
    return path.read_text(encoding="utf-8").splitlines()


def _counts(library: ctypes.CDLL) -> list[int]:
    numbers = (ctypes.c_long * 11)()
    library.null_counts(numbers)
    return list(numbers)


def _memory(library: ctypes.CDLL) -> tuple[int, int]:
    numbers = (ctypes.c_long * 2)()
    library.null_memory(numbers)
    return numbers[0], numbers[1]


def _torch() -> Path:
    """Return the folder of a torch that this device suits."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuildError("there is no torch")
    folder = Path(spec.origin).parent
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuildError("this torch is no CUDA build; `pip install torch==2.14.1 torchvision==0.29.1` is one")
    return folder


def _built(cache: Path) -> Path:
    torch = _torch()
    texts = [torch / "version.py", Path(__file__), *SOURCES]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in texts)).hexdigest()[:16]
    folder = cache / key
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            out = Path(scratch) / "device"
            out.mkdir()
            _build(torch, out)
            with contextlib.suppress(OSError):  # another process was first
                out.rename(folder)
    return folder


def _build(torch: Path, out: Path) -> None:
    """Compile the device: what is written, and a stub for every other function that torch wants of CUDA."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which("nm") is None:
        raise CannotBuildError("there is no `cc` or no `nm`; install a C compiler and binutils")
    found = [sorted(torch.parent.glob(f"nvidia/**/include/{name}")) for name in ("driver_types.h", "cudnn.h")]
    if not all(found):
        raise CannotBuildError("there are no headers of CUDA or cuDNN beside this torch; its wheel from PyPI has them")
    stubs, driver = _stubs(_wanted(torch / "lib"))
    (out / "crt").mkdir()
    (out / "crt" / "host_defines.h").write_text(HOST_DEFINES)
    (out / "stubs.c").write_text(stubs)
    (out / "driver.c").write_text(driver)
    includes = [f"-I{out}", *(f"-I{paths[0].parent}" for paths in found)]
    flags = [compiler, "-std=gnu11", "-O1", "-w", "-shared", "-fPIC", *includes]
    for command in (
        [*flags, "-o", out / "libnull.so", *SOURCES, out / "stubs.c", "-lpthread"],
        [*flags, "-Wl,-soname,libcuda.so.1", "-o", out / "libcuda.so.1", out / "driver.c"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuildError(f"the compiler says {done.stderr[:300]}")


def _wanted(folder: Path) -> set[str]:
    """Return the names of all functions that torch's libraries want of CUDA's."""
    wanted = set()
    for library in folder.glob("lib*.so"):
        command = ["nm", "-D", "--undefined-only", library]
        listing = subprocess.run(command, capture_output=True, text=True, check=False)
        wanted |= {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines() if line.strip()}
    return {name for name in wanted if OF_CUDA.match(name)}


def _stubs(wanted: set[str]) -> tuple[str, str]:
    """Return C for what `SOURCES` leave out: of the runtime and the libraries, and of the driver."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    written = set(re.findall(r"\b((?:__)?cu\w+)\s*\(", source))
    written |= set(re.findall(r"__asm__..(\w+)", source)) | set(re.findall(r"^ALGO.(\w+)", source, re.MULTILINE))
    driver = {name for name in wanted if re.match(r"cu[A-Z]", name) and not name.startswith("cuFile")}
    stubs = ["#include <stdlib.h>", "int null_library(const char *);"]
    for name in sorted(wanted - written - driver):
        if KEPT.search(name):
            continue
        if "Create" in name:
            stubs.append(f"int {name}(void **p) {{ *p = calloc(1, 256); return 0; }}")
        elif QUIET.search(name):
            stubs.append(f"int {name}() {{ return 0; }}")
        else:
            stubs.append(f'int {name}() {{ return null_library("{name}"); }}')
    plain = "int {0}() {{ return 0; }}"
    functions = [DRIVER.get(name, plain).format(name) for name in sorted(driver)]
    return "\n".join(stubs), "\n".join(
        ["#include <stddef.h>", "void null_count(int, const char *, size_t);", *functions]
    )
