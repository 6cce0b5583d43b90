"""Compiled kernels on disk, shared by all processes of a user.

A file is written whole under another name and then renamed, so that readers need no lock and see all of it or nothing;
of two writers the later wins, with the same bytes. A file whose checksum is wrong counts as none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["cached", "folder", "forget"]

_LOG = logging.getLogger(__name__)
_SUM = hashlib.sha256().digest_size


def folder() -> Path:
    """Return where compiled kernels are kept: ``AUTOAMP_KERNELS_CACHE``, or a folder in the user's caches."""
    given = os.environ.get("AUTOAMP_KERNELS_CACHE")
    if given:
        return Path(given)
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "autoamp_kernels"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "autoamp_kernels"


def _file(name: str, *key: object) -> Path:
    return folder() / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.bin"


def cached(name: str, key: tuple[object, ...], make: Callable[[], bytes]) -> bytes:
    """Return what ``make`` gives, from the disk if it was made before.

    Args:
        name: The beginning of the file's name.
        key: All that the result depends on.
        make: Makes it. A folder that cannot be read or written costs no more than a call of this in each process.
    """
    path = _file(name, *key)
    try:
        kept = path.read_bytes()
        if hashlib.sha256(kept[_SUM:]).digest() == kept[:_SUM]:
            return kept[_SUM:]
        _LOG.warning("%s is damaged; made again", path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _LOG.warning("%s cannot be read: %s; made again", path, error)
    made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{name}-", delete=False) as fresh:
            try:
                fresh.write(hashlib.sha256(made).digest() + made)
                fresh.close()
                os.replace(fresh.name, path)
            except BaseException:
                os.unlink(fresh.name)
                raise
    except OSError as error:
        _LOG.warning("%s cannot be written: %s; set AUTOAMP_KERNELS_CACHE to a folder that can", path, error)
    return made


def forget(name: str, key: tuple[object, ...]) -> None:
    """Delete what was kept, if it was."""
    _file(name, *key).unlink(missing_ok=True)
