"""Libraries that train through Apex do so through autoamp, as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launches import forks, launched

PROGRAM = Path(__file__).with_name("apex_programs.py")

pytestmark = forks


def train(library: str, *levels: str) -> dict[str, dict[str, Any]]:
    """Train in a program of its own, since these libraries keep the apex that they met first."""
    done = launched(PROGRAM.parent, {library: ["python", str(PROGRAM), library, *levels]})[library]
    assert done.code == 0, done.out[-2000:] + done.err[-4000:]
    ended: dict[str, dict[str, Any]] = json.loads(done.out.splitlines()[-1])
    assert list(ended) == list(levels)
    return ended


@pytest.mark.parametrize(
    ("library", "levels", "skipped"),
    [
        pytest.param("catalyst", ("O1", "O2"), 1, marks=pytest.mark.client("catalyst", "hydra_slayer", "tensorboardX")),
        pytest.param("ignite", ("O1", "O2"), 1, marks=pytest.mark.client("ignite")),
        pytest.param("timm", ("O1", "O2"), 1, marks=pytest.mark.client("timm", "torchvision")),
        # It gives its step a closure, which is asked again at a lower scale, so that nothing is skipped. Not at O2: it
        # calls the model with its Trial among the arguments, and `Trial.to` casts the optimizer's state in place.
        pytest.param("torchbearer", ("O1",), 0, marks=pytest.mark.client("torchbearer")),
    ],
    ids=["catalyst", "ignite", "timm", "torchbearer"],
)
def test_library_trains_through_its_apex_path(library: str, levels: tuple[str, ...], skipped: int) -> None:
    for level, ended in train(library, *levels).items():
        assert ended["accuracy"] > 0.9
        # Cast: at O1 by torch's patched functions, at O2 the model casts what it returns back to fp32.
        assert ended["logits"] == {"O1": "torch.float16", "O2": "torch.float32"}[level]
        # Scaled by 2**16: gradients of a mean cross entropy add up to 2 at most.
        assert 2**15 < ended["gradient"] < 2**17
        assert ended["skipped"] == skipped
        assert ended["loss_scale"] == 2**15
        assert ended["stayed"]
        assert ended["finite"]
