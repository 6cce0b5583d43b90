"""Pinned weights, which are promised to stay: packed once for oneDNN, which else reorders them at each call."""

from __future__ import annotations

from autoamp.inference.packed import PACKED, build_packed

__all__ = ["PACKED", "build_packed"]
