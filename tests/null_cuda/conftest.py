"""The comparison is collected only where it is asked for, and runs only under the null device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.null_cuda import device


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out but for a run that asks for the mark."""
    asked = config.getoption("markexpr", "")
    return None if "null_cuda" in asked and "not null_cuda" not in asked else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the comparison where there is no null device, with the reason."""
    here = Path(__file__).parent
    # Pytest hands over the items of other folders too.
    ours = [item for item in items if here in item.path.parents]
    reason = device.obstacle() if ours else None
    for item in ours if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))
