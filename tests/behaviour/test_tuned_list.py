"""docs/howto/tuned_list.md: use a list that `autoamp tune` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.cli import main

TEXT = 'schema = 1\nfp32 = ["linear"]\n\n[modules]\n"net.Head" = "fp32"\n'


def dtype_of_linear() -> torch.dtype:
    out: torch.Tensor = torch.nn.Linear(4, 4)(torch.rand(1, 4))
    return out.dtype


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tuned.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_list_is_not_used_by_itself(tuned: Path) -> None:
    autoamp.init(device_type="cpu", dtype=torch.float16)
    assert dtype_of_linear() == torch.float16


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_init_and_the_environment_take_a_list(way: str, tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "environment":
        monkeypatch.setenv("AUTOAMP_LISTS", str(tuned))
    autoamp.init(device_type="cpu", dtype=torch.float16, lists="tuned.toml" if way == "argument" else None)
    assert dtype_of_linear() == torch.float32


@pytest.mark.parametrize("folder", [".", "inner"])
def test_a_project_has_its_list_in_its_folder_or_a_parent(
    folder: str, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tuned.parent / "inner").mkdir()
    tuned.rename(tuned.parent / "autoamp.toml")
    monkeypatch.chdir(tuned.parent / folder)
    autoamp.init(device_type="cpu", dtype=torch.float16)
    assert dtype_of_linear() == torch.float32


def test_lists_shows_the_rules_of_a_file_with_their_lines(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lists", "--set", "tuned.toml", "linear"]) == 0
    assert "tuned.toml:2" in capsys.readouterr().out
