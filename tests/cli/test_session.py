"""What `autoamp run` sets up before a program, and counts for the report."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.apex.alias import options as alias_options
from autoamp.cli.session import Options, set_up
from autoamp.compat import fastai1, uninstall
from autoamp.core import activated, suspended


@pytest.fixture(autouse=True)
def alias_removed() -> Iterator[None]:
    yield
    uninstall()


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), torch.bfloat16), ((7, 5), torch.float16), ((6, 1), None)])
def test_bf16_is_the_default_where_the_gpu_has_units_for_it(
    capability: tuple[int, int], dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AUTOAMP_HALF_UNITS")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run = set_up(Options(device_type="cuda"))
    assert (run.handle.settings.dtype if isinstance(run.handle, autoamp.Handle) else None) is dtype
    assert run.options.opt_level == ("O0" if dtype is None else "O1")
    # Apex knew fp16 alone.
    assert alias_options().dtype is torch.float16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the question is asked in a fork")
def test_the_device_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_here: list[bool] = []

    def get_device_capability() -> tuple[int, int]:
        asked_here.append(True)
        return 8, 0

    monkeypatch.delenv("AUTOAMP_HALF_UNITS")
    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    run = set_up(Options(device_type="cuda"))
    assert run.handle.settings.dtype is torch.bfloat16
    assert not asked_here
    # That process is none of the program's.
    assert not run.report([], 0).only_waited


@pytest.mark.parametrize("asked", [True, False])
def test_fastai_is_mended_where_that_is_asked_for(asked: bool, folder: Path) -> None:
    (folder / "fastai").mkdir()
    (folder / "fastai" / "__init__.py").touch()
    (folder / "fastai" / "basic_train.py").write_text("import torch\n", encoding="utf-8")
    set_up(Options(opt_level="O0", fastai1=asked))
    before = list(activated), list(suspended)
    module = importlib.import_module("fastai.basic_train")
    # The import of fastai adds to these, for as long as a process lasts.
    activated[:], suspended[:] = before
    # Its own `torch.load` takes whole pickles.
    assert (module.torch is not torch) is asked
    fastai1.disable()
    assert module.torch is torch


def test_a_summary_tells_of_the_list_of_a_parent_folder_after_the_program_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "autoamp.toml").write_text("schema = 1\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    run = set_up(Options(dtype="bf16", device_type="cpu"))
    os.chdir(tmp_path)
    (tmp_path / "run").rmdir()
    assert f"{tmp_path / 'autoamp.toml'} of a parent folder" in run.report(["x.py"], 0).summary()[0]
