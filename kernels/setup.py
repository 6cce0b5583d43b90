"""Compiles the library with the C++ compiler at hand: no headers of Python or torch, so one wheel serves all of them.

The settings are in pyproject.toml. The compiler is ``$CXX``, or else the first of c++, g++ and clang++ that is found.
Where nvcc is found (``$CUDA_HOME/bin``, PATH), it compiles the kernels for GPUs into the same library:
``AUTOAMP_KERNELS_CUDA=0`` leaves them out, ``AUTOAMP_KERNELS_CUDA="90 120"`` takes these architectures alone, and a
failing nvcc ends the build.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = Path(__file__).resolve().parent
LIBRARY = "libautoamp_kernels.so"

FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    # The same bits for all processors: no fused multiply-adds. The rest lets loops with roots and choices be vectors.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
# Machine code serves later minor versions too: 8.0 is 8.6's and 8.9's. What is newer than all of it takes the PTX.
CUDA_CODE = (75, 80, 90, 100, 120)
CUDA_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden"]
# A kernel has up to 32,764 bytes of parameters from this version on.
OLDEST_NVCC = (12, 1)


def compiler() -> list[str]:
    """Return the command of a C++ compiler; SystemExit where there is none."""
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise SystemExit("autoamp-kernels: found no C++ compiler (c++, g++, clang++); install one, or set CXX to its path")


def output(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def nvcc() -> str | None:
    """Return the command of nvcc; None where there is none, it is not wanted, or it is too old."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")
    if found is None or os.environ.get("AUTOAMP_KERNELS_CUDA") == "0":
        return None
    release = re.search(r"release (\d+)\.(\d+)", output(found, "--version"))
    version = (int(release[1]), int(release[2])) if release else (0, 0)
    if version >= OLDEST_NVCC:
        return found
    sys.stderr.write(f"autoamp-kernels: nvcc {version[0]}.{version[1]}, older than 12.1, is left out\n")
    return None


def architectures(command: str) -> list[int]:
    """Return the compute capabilities to compile for: those of ``AUTOAMP_KERNELS_CUDA``, or ours that nvcc knows."""
    known = sorted({int(one) for one in re.findall(r"^sm_(\d+)$", output(command, "--list-gpu-code"), re.MULTILINE)})
    wanted = sorted({int(one) for one in os.environ.get("AUTOAMP_KERNELS_CUDA", "").split()})
    unknown = [one for one in wanted if one not in known]
    if unknown:
        raise SystemExit(
            f"autoamp-kernels: AUTOAMP_KERNELS_CUDA={os.environ['AUTOAMP_KERNELS_CUDA']!r} has {unknown[0]}, which "
            f"{command} does not list; choose of {' '.join(map(str, known))}, or unset it"
        )
    return wanted or [one for one in CUDA_CODE if one in known] or known[:1]


def compile_library(target: Path, scratch: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile the sources, and link them to the shared library ``target``.

    Args:
        target: The file to write.
        scratch: A directory for object files.
        extra: More flags, for the compiler and the linker both.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    cpu, cuda, linker = scratch / "cpu.o", scratch / "cuda.o", [*compiler(), "-shared"]
    subprocess.run([*compiler(), *FLAGS, *extra, "-c", str(HERE / "src" / "cpu.cpp"), "-o", str(cpu)], check=True)
    objects, command = [str(cpu)], nvcc()
    if command:
        code = architectures(command)
        made = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in code]
        made += [f"-gencode=arch=compute_{code[0]},code=compute_{code[0]}", f"-DAK_OLDEST_CARD={code[0]}"]
        source = ["--threads", "0", "-c", str(HERE / "src" / "cuda.cu"), "-o", str(cuda)]
        subprocess.run([command, *CUDA_FLAGS, *made, *source], check=True)
        # It links CUDA's runtime in, which looks for the driver when it is called first.
        objects, linker = [*objects, str(cuda)], [command, "-shared"]
    # Replaced at one go: another process may have the old one open.
    fresh = target.with_suffix(f".{os.getpid()}")
    subprocess.run([*linker, *extra, *objects, "-o", str(fresh)], check=True)
    os.replace(fresh, target)


class BuildLibrary(build_py):
    """Compiles the library beside the package's modules."""

    target: Path | None = None

    def run(self) -> None:
        """Copy the modules, and compile."""
        super().run()
        root = HERE if self.editable_mode else Path(self.build_lib)
        self.target = root / "autoamp_kernels" / LIBRARY
        compile_library(self.target, Path(self.get_finalized_command("build").build_temp))  # type: ignore[attr-defined]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return what the build writes, the library too."""
        return [*super().get_outputs(include_bytecode), *([str(self.target)] if self.target else [])]


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
    else:
        setup(cmdclass={"build_py": BuildLibrary, "bdist_wheel": PlatformWheel}, distclass=WithLibrary)
