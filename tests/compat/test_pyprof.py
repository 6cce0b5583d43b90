"""The profiler that is none: programs that mark calls run, and are told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from autoamp.compat import pyprof
from autoamp.errors import UsageError


def test_nothing_is_marked_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.relu, torch.nn.functional.linear
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        pyprof.init()
    assert "torch.profiler" in caplog.text
    pyprof.wrap(torch.nn.functional, "linear")
    assert (torch.relu, torch.nn.functional.linear) == before
    with pytest.raises(UsageError, match="no function 'nope'"):
        pyprof.wrap(torch, "nope")


def test_by_the_names_of_apex(apex: Any) -> None:
    from apex import pyprof as theirs
    from apex.pyprof import nvtx

    assert apex.pyprof is theirs
    assert theirs.nvtx is nvtx
    assert (nvtx.init, nvtx.wrap) == (nvtx.nvmarker.init, nvtx.nvmarker.add_wrapper) == (pyprof.init, pyprof.wrap)
    with pytest.raises(ImportError, match=r"torch\.profiler"):
        exec("import apex.pyprof.prof")
