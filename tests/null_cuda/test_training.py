"""Training steps and inference beside torch.autocast and GradScaler: dtypes are the same, and nothing costs more."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from tests.null_cuda.known import known, verdict
from tests.null_cuda.training import Case, all_cases, differences

pytestmark = pytest.mark.null_cuda

CASES = list(all_cases())


def test_each_entry_is_about_something() -> None:
    for entry in known("training"):
        assert len(entry.reason) > 20
        assert any(entry.covers(**dataclasses.asdict(case)) for case in CASES), entry


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training(case: Case) -> None:
    with warnings.catch_warnings():
        # An eps that half precision cannot hold: no values here.
        warnings.filterwarnings("ignore", message=".*eps=")
        # Torch's own, of models in bf16.
        warnings.filterwarnings("ignore", message="RNN module weights")
        found = differences(case)
    wrong = verdict("training", found, **dataclasses.asdict(case))
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
