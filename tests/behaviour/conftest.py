"""The program of `autoamp tune` and `bisect`, whose runs are forks."""

from __future__ import annotations

from tests.cli.conftest import forked, own_path, script

__all__ = ["forked", "own_path", "script"]
