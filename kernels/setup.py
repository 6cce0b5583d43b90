"""Compiles the library with the C++ compiler at hand: no headers of Python or torch, so one wheel serves all of them.

The settings are in pyproject.toml. The compiler is ``$CXX``, or else the first of c++, g++ and clang++ that is found.
"""

from __future__ import annotations

import os
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
    subprocess.run([*command, "-shared", "-pthread", *extra, *map(str, objects), "-o", str(fresh)], check=True)
    os.replace(fresh, target)
    return target


class BuildLibrary(build_py):
    """Compiles the library beside the package's modules."""

    def run(self) -> None:
        """Copy the modules, and compile."""
        super().run()
        root = HERE if self.editable_mode else Path(self.build_lib)
        scratch = Path(self.get_finalized_command("build").build_temp)  # type: ignore[attr-defined]
        compile_library(root / "autoamp_kernels" / LIBRARY, scratch)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return what the build writes, the library too."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / "autoamp_kernels" / LIBRARY)]


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
