"""Tests of real libraries: skipped where a library is absent, failed there with ``AUTOAMP_CLIENTS=required``."""

from __future__ import annotations

import importlib.util
import os

import pytest

REMEDY = "install the extras fastai1 and clients, then `pip install --no-deps -r tests/clients/requirements.txt`"


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    """Look for the modules that a test names in its mark: ``@pytest.mark.client("timm", "torchvision")``."""
    mark = request.node.get_closest_marker("client")
    assert mark is not None, "a test in tests/clients has the mark `client`, with the modules that it needs"
    absent = [name for name in mark.args if importlib.util.find_spec(name) is None]
    if absent:
        told = f"{', '.join(absent)} not installed: {REMEDY}"
        if os.environ.get("AUTOAMP_CLIENTS") == "required":
            pytest.fail(f"{told}; AUTOAMP_CLIENTS=required", pytrace=False)
        pytest.skip(told)
