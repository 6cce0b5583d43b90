"""Single ops beside torch.autocast: nothing raises where it runs, dtypes are the same, no more is saved."""

from __future__ import annotations

import pytest

from tests.null_cuda.known import known, verdict
from tests.null_cuda.ops import called, differences, listed, names
from tests.null_cuda.training import HALVES

pytestmark = pytest.mark.null_cuda


def test_every_listed_op_is_called() -> None:
    missing = listed() - called()
    assert missing == {name for entry in known("not_called") for name in entry.where["op"]}


def test_each_entry_is_about_an_op() -> None:
    for entry in known("op"):
        assert len(entry.reason) > 20
        assert set(entry.where["op"]) <= set(names()), entry


@pytest.mark.parametrize("half_name", HALVES)
@pytest.mark.parametrize("name", names())
def test_op(name: str, half_name: str) -> None:
    wrong = verdict("op", differences(name, half_name), op=name, half=half_name)
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
