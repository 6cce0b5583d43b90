"""The CUDA kernels beside the references of the CPU's: the same tests, on an emulated device."""

from __future__ import annotations

import pytest

from tests.kernels.conftest import EmulatedCuda
from tests.kernels.test_gradients import *  # noqa: F403  run again
from tests.kernels.test_layerwise import *  # noqa: F403
from tests.kernels.test_norms import *  # noqa: F403
from tests.kernels.test_optimizers import *  # noqa: F403

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("emulated")]


@pytest.fixture
def variant(emulated: EmulatedCuda) -> str:
    """Stand for the variants of the CPU."""
    return "cuda"
