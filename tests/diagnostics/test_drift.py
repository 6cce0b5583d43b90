"""Every public callable of the installed torch has a policy, or a reason to have none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autoamp.diagnostics import drift
from autoamp.diagnostics.drift import autocast_header, check_lists, parse_autocast, public_names
from autoamp.ops.targets import known_ops
from autoamp.rules.loader import shipped_table
from autoamp.rules.table import CastPolicy, CastTable

HEADER = autocast_header()


def test_every_public_callable_of_this_torch_is_classified() -> None:
    found = check_lists()
    assert found.lines == ()
    assert found.torch == torch.__version__


def test_every_name_that_is_left_alone_has_a_reason() -> None:
    rules = [rule for rule in shipped_table("default").rules if rule.policy is CastPolicy.NONE]
    assert len(rules) > 600
    assert [rule.target for rule in rules if not rule.reason] == []
    assert 8 < len({rule.reason for rule in rules}) < 24


def test_public_names() -> None:
    names = public_names()
    assert {"relu", "__add__", "__getitem__", "i0e", "hfft", "vecdot", "relu_", "is_tensor", "pad"} <= names
    assert names.isdisjoint({"__delattr__", "__sizeof__", "_convolution", "Tensor", "float32", "_foreach_add"})


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
    assert check_lists().lines == tuple(
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
    lines = {line.partition(":")[0]: line for line in check_lists().lines}
    assert lines["entr"].startswith("entr: not in torch 2.13.0 (lists/default.toml:")
    assert "[versions]" in lines["torch.linalg.cond"]
    assert "in torch 2.13.0, though limited to >=2.14 (lists/" in lines["torch.linalg.polar"]


def test_limits_follow_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> set[str]:
        return {line.partition(":")[0] for line in check_lists().lines if ": not in torch " in line}

    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert gone() >= {"align_to", "rename"}
    newer = {"scaled_addmm"} - known_ops()
    monkeypatch.setattr(torch, "__version__", "99.0")
    monkeypatch.delattr(torch.linalg, "matrix_sqrth", raising=False)
    assert gone() >= {"torch.linalg.matrix_sqrth", *newer}


HEADER_TEXT = """
#define AT_FORALL_LOWER_PRECISION_FP(_)  \\
  _(_convolution, deprecated)            \\
  _(linalg_vecdot)                       \\
  _(new_matmul)

#define AT_FORALL_FP32(_)             \\
  _(pow, Tensor_Scalar)               \\
  _(gelu)                             \\
  _(_upsample_bicubic2d_aa)

#define AT_FORALL_FP32_SET_OPT_DTYPE(_) \\
  _(softmax, int)

#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(_)                         \\
  _(ADD_NS(norm),                                                           \\
    "norm.Scalar",                                                          \\
    fp32_append_dtype)

#define AT_FORALL_PROMOTE(_) \\
  _(dot)                     \\
  _(linear)
"""


def test_parse_autocast() -> None:
    assert {name: policy.value for name, policy in parse_autocast(HEADER_TEXT).items()} == {
        "_convolution": "fp16", "vecdot": "fp16", "new_matmul": "fp16", "pow": "fp32", "gelu": "fp32",
        "interpolate": "fp32", "softmax": "fp32", "norm": "fp32", "dot": "promote", "linear": "promote",
    }  # fmt: skip
    with pytest.raises(ValueError, match="no list AT_FORALL_LOWER_PRECISION_FP; its form has changed"):
        parse_autocast("#pragma once")


def test_an_op_that_torch_moved_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drift, "autocast_header", lambda: None)
    assert check_lists()[1:] == (None, ())
    header = tmp_path / "autocast_mode.h"
    header.write_text(HEADER_TEXT, encoding="utf-8")
    monkeypatch.setattr(drift, "autocast_header", lambda: header)
    found = check_lists()
    assert found.header == header
    gelu, linear, new = found.lines
    assert gelu.startswith("gelu: fp32 in torch's autocast, none (lists/default.toml:")
    assert linear.startswith("linear: promote in torch's autocast, fp16 (lists/default.toml:")
    assert new == "new_matmul: fp16 in torch's autocast, in no list here"


@pytest.mark.skipif(HEADER is None, reason="this torch has no headers")
def test_the_header_of_this_torch_is_read() -> None:
    assert HEADER is not None
    policies = parse_autocast(HEADER.read_text(encoding="utf-8"))
    assert len(policies) > 90
    assert [policies[name].value for name in ("linear", "softmax", "norm")] == ["fp16", "fp32", "fp32"]


def test_projects_are_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "autoamp.toml").write_text('schema = 1\nfp32 = ["linear"]\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOAMP_LISTS", "nosuch")
    assert check_lists().lines == ()
    table = shipped_table("apex")
    assert isinstance(table, CastTable)
    assert table.sources == ("lists/default.toml", "lists/apex.toml")
