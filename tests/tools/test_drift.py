"""Every public callable of the installed torch has a policy, or a reason to have none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autoamp.core import CastPolicy, CastTable, known_ops, shipped_table
from tests.tools.list_checks import check_lists


def test_every_public_callable_of_this_torch_is_classified() -> None:
    assert check_lists() == ()


def test_every_name_that_is_left_alone_has_a_reason() -> None:
    rules = [rule for rule in shipped_table("default").rules if rule.policy is CastPolicy.NONE]
    assert len(rules) > 600
    assert [rule.target for rule in rules if not rule.reason] == []
    assert 8 < len({rule.reason for rule in rules}) < 24


@pytest.fixture
def fresh_names() -> Iterator[None]:
    known_ops.cache_clear()
    yield
    known_ops.cache_clear()


@pytest.mark.usefixtures("fresh_names")
def test_a_new_op_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.special, "brand_new_op", torch.exp, raising=False)
    monkeypatch.setattr(torch.Tensor, "__brandnew__", torch.exp, raising=False)
    monkeypatch.setattr(torch.Tensor, "exp_like_", torch.exp, raising=False)
    assert check_lists() == tuple(
        f"{name}: new in torch {torch.__version__}; give it a policy, or a reason under [none]"
        for name in ("__brandnew__", "brand_new_op", "exp_like_")
    )


@pytest.mark.usefixtures("fresh_names")
def test_an_op_that_is_gone_or_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.delattr(torch.special, "entr")
    monkeypatch.delattr(torch.linalg, "cond")
    monkeypatch.setattr(torch.linalg, "polar", torch.linalg.inv, raising=False)
    # A newer torch has others of this kind too.
    lines = {line.partition(":")[0]: line for line in check_lists()}
    assert lines["entr"].startswith("entr: not in torch 2.13.0 (lists/default.toml:")
    assert "[versions]" in lines["torch.linalg.cond"]
    assert "in torch 2.13.0, though limited to >=2.14 (lists/" in lines["torch.linalg.polar"]


def test_limits_follow_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> set[str]:
        return {line.partition(":")[0] for line in check_lists() if ": not in torch " in line}

    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert gone() >= {"align_to", "rename"}
    newer = {"scaled_addmm"} - known_ops()
    monkeypatch.setattr(torch, "__version__", "99.0")
    monkeypatch.delattr(torch.linalg, "matrix_sqrth", raising=False)
    assert gone() >= {"torch.linalg.matrix_sqrth", *newer}


def test_projects_are_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "autoamp.toml").write_text('schema = 1\nfp32 = ["linear"]\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOAMP_LISTS", "nosuch")
    assert check_lists() == ()
    table = shipped_table("apex")
    assert isinstance(table, CastTable)
    assert table.sources == ("lists/default.toml", "lists/apex.toml")
