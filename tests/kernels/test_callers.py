"""The optimizers by the kernels for GPUs, on an emulated one, beside the same by torch's functions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernels import callers
from tests.kernels.conftest import COMPILER, KERNELS, emulated_library
from tests.launches import ROOT, Ended, launched

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(COMPILER is None or not hasattr(os, "fork"), reason="wants a C++ compiler, and forks"),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How each case ended, in a process of its own: autoamp looks for kernels once in a process."""
    runs = {name: ["python", str(Path(callers.__file__)), name] for name in callers.CASES}
    return launched(
        tmp_path_factory.mktemp("callers"), runs, AUTOAMP_KERNELS_LIBRARY=str(emulated_library()), EMULATED_CUDA="1",
        PYTHONPATH=os.pathsep.join((str(ROOT), str(KERNELS))),
    )  # fmt: skip


@pytest.mark.parametrize("name", callers.CASES)
def test_kernels_change_nothing_but_rounding(name: str, ended: dict[str, Ended]) -> None:
    assert ended[name].code == 0, ended[name].err
