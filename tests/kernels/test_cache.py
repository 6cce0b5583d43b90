"""Compiled kernels on disk: several processes, damaged files, folders that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import autoamp_kernels
import pytest
from autoamp_kernels.cache import cached, folder, forget


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOAMP_KERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never() -> bytes:
    raise AssertionError("made again")


def test_made_once_for_a_key(own_folder: Path) -> None:
    assert cached("sm_90", ("a", 1), lambda: b"one") == b"one"
    assert cached("sm_90", ("a", 1), never) == b"one"
    assert cached("sm_90", ("a", 2), lambda: b"two") == b"two"
    assert len(list(own_folder.iterdir())) == 2
    forget("sm_90", ("a", 1))
    assert cached("sm_90", ("a", 1), lambda: b"new") == b"new"


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
def test_a_damaged_file_is_made_again(own_folder: Path, damage: bytes) -> None:
    cached("sm_90", (), lambda: b"one")
    (path,) = own_folder.iterdir()
    path.write_bytes(damage)
    assert cached("sm_90", (), lambda: b"one") == b"one"
    assert cached("sm_90", (), never) == b"one"


def test_a_folder_that_cannot_be_written_costs_no_more_than_time(own_folder: Path) -> None:
    own_folder.write_text("a file")
    assert cached("sm_90", (), lambda: b"one") == b"one"


def test_nothing_is_left_where_making_fails(own_folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        cached("sm_90", (), lambda: bytes(1 // 0))
    assert not own_folder.exists()


def test_several_processes(own_folder: Path) -> None:
    place = str(Path(autoamp_kernels.__file__).parents[1])
    program = (
        "from autoamp_kernels.cache import cached; print(len({cached('x', (), lambda: b'1' * 10**6) for _ in [0]}))"
    )
    environment = {**os.environ, "PYTHONPATH": place}
    running = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) for _ in range(3)
    ]
    assert [one.communicate(timeout=120)[0] for one in running] == [b"1\n"] * 3
    assert cached("x", (), never) == b"1" * 10**6
    assert len(list(own_folder.iterdir())) == 1


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AUTOAMP_KERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "autoamp_kernels"
