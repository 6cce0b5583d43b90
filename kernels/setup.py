"""Compiles the library with the C++ compiler at hand: no headers of Python or torch, so one wheel serves all of them.

The settings are in pyproject.toml. The compiler is ``$CXX``, or else the first of c++, g++ and clang++ that is found.
Where nvcc is found (``$CUDA_HOME/bin``, PATH), it compiles the CUDA kernels too: ``AUTOAMP_KERNELS_CUDA=0`` leaves them
out, ``AUTOAMP_KERNELS_CUDA="90 120"`` takes these architectures alone, and a failing nvcc ends the build. An nvcc that
knows fewer architectures compiles for those that it lists; one older than 12.1 is left out, as it cannot pass a kernel
so many parameters.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARY = "libautoamp_kernels.so"

FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wno-psabi"),
    # All variants give the same bits: no fused multiply-adds. A root is one instruction: it need not set errno.
    *("-ffp-contract=off", "-fno-math-errno"),
]
# Each variant by its own file, and nothing else with these flags.
OF_FILE = {
    "cpu_avx2.cpp": ["-mavx2", "-mf16c"],
    "cpu_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"],
}

# Machine code serves later minor versions too: 8.0 is 8.6's and 8.9's. What is newer than all of it takes the PTX.
CUDA_CODE = (75, 80, 90, 100, 120)
CUDA_FLAGS = ["-std=c++17", "-O3", "--fmad=false"]
# Kernels have up to 32,764 bytes of parameters from this version on; a fat binary can be compressed from that one on.
OLDEST_NVCC, COMPRESSING_NVCC = (12, 1), (12, 8)
CUDA_SOURCE, CUDA_IMAGE, CUDA_CONTENTS = "kernels.cu", "kernels.fatbin", "kernels.json"


def compiler() -> list[str]:
    """Return the command of a C++ compiler; SystemExit where there is none."""
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise SystemExit("autoamp-kernels: found no C++ compiler (c++, g++, clang++); install one, or set CXX to its path")


def compile_library(target: Path, scratch: Path, extra: tuple[str, ...] = ()) -> Path:
    """Compile all sources, and link them to the shared library ``target``.

    Args:
        target: The file to write.
        scratch: A directory for object files.
        extra: More flags, for the compiler and the linker both.
    """
    command, x86 = compiler(), os.uname().machine in ("x86_64", "AMD64")
    scratch.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        made = scratch / f"{source.stem}.o"
        flags = [*FLAGS, *(OF_FILE.get(source.name, []) if x86 else []), *extra]
        subprocess.run([*command, *flags, "-c", str(source), "-o", str(made)], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"))))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Replaced at one go: another process may have the old one open.
    fresh = target.with_suffix(f".{os.getpid()}")
    subprocess.run([*command, "-shared", "-pthread", *extra, *map(str, objects), "-ldl", "-o", str(fresh)], check=True)
    os.replace(fresh, target)
    return target


def one_source(path: Path, seen: set[Path]) -> str:
    """Return a source with the files that it includes in their places, each once."""
    seen.add(path)
    lines = []
    for line in path.read_text().splitlines():
        included = re.match(r'#include "(.*)"', line)
        if not included:
            lines.append(line)
        elif (other := path.with_name(included[1])) not in seen:
            lines.append(one_source(other, seen))
    return "\n".join(lines)


def nvcc() -> str | None:
    """Return the command of nvcc; None where there is none, it is not wanted, or it is too old."""
    if os.environ.get("AUTOAMP_KERNELS_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")
    if found is None or nvcc_version(found) >= OLDEST_NVCC:
        return found
    sys.stderr.write(
        f"autoamp-kernels: {found} is nvcc {'.'.join(map(str, nvcc_version(found)))}, older than 12.1; its kernels are "
        "left out, and NVRTC compiles them at first use\n"
    )
    return None


@functools.cache
def nvcc_version(command: str) -> tuple[int, int]:
    """Return the version of nvcc, such as (13, 0)."""
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    return (int(release[1]), int(release[2])) if release else (0, 0)


@functools.cache
def nvcc_codes(command: str) -> list[int]:
    """Return the compute capabilities for which nvcc makes machine code, ascending."""
    said = subprocess.run([command, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return sorted({int(one) for one in re.findall(r"^sm_(\d+)$", said, re.MULTILINE)})


def nvcc_command(source: Path, target: Path, *extra: str) -> list[str]:
    """Return the command that compiles the CUDA kernels to a fat binary."""
    command = nvcc() or "nvcc"
    code = cuda_code(command)
    architectures = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in code]
    architectures.append(f"-gencode=arch=compute_{code[0]},code=compute_{code[0]}")
    flags = [*CUDA_FLAGS, *(["--compress-mode=size"] if nvcc_version(command) >= COMPRESSING_NVCC else [])]
    parallel = ["--threads", str(os.cpu_count() or 1)]
    return [command, *flags, *parallel, *architectures, *extra, "-fatbin", str(source), "-o", str(target)]


def cuda_code(command: str) -> list[int]:
    """Return the compute capabilities to compile for: those of ``AUTOAMP_KERNELS_CUDA``, or ours that nvcc knows.

    An nvcc that knows none of ours compiles for the oldest that it lists, whose PTX serves later cards.
    """
    known = nvcc_codes(command)
    wanted = sorted({int(one) for one in os.environ.get("AUTOAMP_KERNELS_CUDA", "").split()})
    unknown = [one for one in wanted if one not in known]
    if unknown:
        raise SystemExit(
            f"autoamp-kernels: AUTOAMP_KERNELS_CUDA={os.environ['AUTOAMP_KERNELS_CUDA']!r} has {unknown[0]}, which "
            f"{command} does not list; choose of {' '.join(map(str, known))}, or unset it"
        )
    return wanted or [one for one in CUDA_CODE if one in known] or known[:1]


def write_cuda(folder: Path) -> list[Path]:
    """Write the CUDA source in one piece, for NVRTC, and what nvcc makes of it, where nvcc is found."""
    folder.mkdir(parents=True, exist_ok=True)
    source, image, contents = (folder / name for name in (CUDA_SOURCE, CUDA_IMAGE, CUDA_CONTENTS))
    source.write_text(one_source(SOURCES / "cuda_kernels.cu", set()) + "\n")
    contents.unlink(missing_ok=True)
    image.unlink(missing_ok=True)
    command = nvcc()
    if command is None:
        return [source]
    subprocess.run(nvcc_command(source, image), check=True)
    code = cuda_code(command)
    contents.write_text(json.dumps({"code": code, "ptx": code[:1]}))
    return [source, image, contents]


class BuildLibrary(build_py):
    """Compiles the library and the CUDA kernels beside the package's modules."""

    written: list[Path]

    def run(self) -> None:
        """Copy the modules, and compile."""
        super().run()
        root = HERE if self.editable_mode else Path(self.build_lib)
        scratch = Path(self.get_finalized_command("build").build_temp)  # type: ignore[attr-defined]
        library = compile_library(root / "autoamp_kernels" / LIBRARY, scratch)
        self.written = [library, *write_cuda(root / "autoamp_kernels")]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return what the build writes, the library too."""
        return [*super().get_outputs(include_bytecode), *map(str, getattr(self, "written", []))]


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the wheel's name."""
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    """A distribution that is not the same on every platform."""

    def has_ext_modules(self) -> bool:
        """Tell that a compiled file belongs to it."""
        return True


if __name__ == "__main__":
    if sys.argv[1:2] == ["library"]:
        # python setup.py library TARGET SCRATCH [FLAG ...]: what tests and sanitizers build.
        compile_library(Path(sys.argv[2]), Path(sys.argv[3]), tuple(sys.argv[4:]))
    elif sys.argv[1:2] == ["cuda"]:
        # python setup.py cuda FOLDER: the CUDA kernels alone.
        write_cuda(Path(sys.argv[2]))
    else:
        setup(cmdclass={"build_py": BuildLibrary, "bdist_wheel": PlatformWheel}, distclass=WithLibrary)
