"""The sweep is collected only where it is asked for: its inputs come from torch's test helpers, which load slowly."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

COLUMNS = ("op", "half", "arguments", "variant", "policy", "result", "error", "remark")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out but for a run that asks for the mark."""
    asked = config.getoption("markexpr", "")
    return None if "sweep" in asked and "not sweep" not in asked else True


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Iterator[list[tuple[object, ...]]]:
    """Rows of results, written to the CSV file that `--op-matrix` names; each xdist worker writes one of its own."""
    rows: list[tuple[object, ...]] = []
    yield rows
    path = request.config.getoption("--op-matrix")
    if path is not None:
        worker = getattr(request.config, "workerinput", {}).get("workerid", "")
        path = path.with_name(f"{path.stem}-{worker}{path.suffix}") if worker else path
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
