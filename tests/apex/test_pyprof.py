"""The profiler that is none: programs that mark calls run, and are told."""

from __future__ import annotations

import logging

import pytest
import torch

from autoamp.apex.pyprof import nvtx as pyprof


def test_nothing_is_marked_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.relu, torch.nn.functional.linear
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        pyprof.init()
    assert "torch.profiler" in caplog.text
    pyprof.wrap(torch.nn.functional, "linear")
    assert (torch.relu, torch.nn.functional.linear) == before
