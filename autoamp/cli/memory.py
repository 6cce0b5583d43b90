"""Freed memory: whether the C library keeps it for the next training step, and the peak of what a process held."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The most that glibc takes on 64 bits: half of a heap of the threads beside the first.
_LARGEST = 32 << 20
_NAMES = ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "MMAP_MAX", "TOP_PAD")


def keep_freed_memory() -> str:
    """Let this process keep the memory that it frees, so that the next training step does not ask for it again.

    A training step on a CPU frees the blocks that the next one allocates. By default glibc returns large ones to the
    system, and each page that comes back costs a page fault: 27,000 a step of a transformer of width 512, none with
    this. `autoamp run` calls it if it computes on a CPU; `init` never does.

    It sets ``M_MMAP_THRESHOLD`` to 32 MiB and ``M_TRIM_THRESHOLD`` to no limit, for all threads of the process and for
    its later forks. Larger blocks return to the system as before. The process does not shrink after its peak.

    Nothing changes where `malloc` is not glibc's (musl, macOS, Windows, a preloaded jemalloc or tcmalloc), or where the
    environment sets one of these values by ``MALLOC_TRIM_THRESHOLD_`` and the like or by ``GLIBC_TUNABLES``.

    Returns:
        ``"kept"``, or ``"not kept: "`` and the reason.
    """
    why = why_not_kept()
    if why is None:
        mallopt = ctypes.CDLL(None).mallopt
        # The second one limits nothing, and is always taken.
        if mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, -1):
            return "kept"
        why = f"glibc refuses a threshold of {_LARGEST >> 20} MiB"
    return f"not kept: {why}"


def why_not_kept() -> str | None:
    """Return why `keep_freed_memory` would change nothing, in words; None where it would."""
    for name in _NAMES:
        if f"MALLOC_{name}_" in os.environ:
            return f"the environment has MALLOC_{name}_"
        if f"glibc.malloc.{name.lower()}" in os.environ.get("GLIBC_TUNABLES", ""):
            return f"GLIBC_TUNABLES has glibc.malloc.{name.lower()}"
    if platform.libc_ver()[0] != "glibc":
        return "this is not Linux with glibc"
    preloaded = re.split(r"[ :]+", os.environ.get("LD_PRELOAD", ""))
    other = next((os.path.basename(file) for file in preloaded if "malloc" in os.path.basename(file)), None)
    return None if other is None else f"malloc is that of {other}, not of glibc"


def peak_rss() -> int | None:
    """Return the most bytes of physical memory that this process has held; None where that is not Linux.

    Not by `getrusage`, whose peak a process inherits from the one that started it.
    """
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else int(found[1]) << 10
