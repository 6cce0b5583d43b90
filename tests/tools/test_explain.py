"""Which rule applies to a name, and where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp
from autoamp.cli import main
from autoamp.errors import UsageError


@pytest.fixture
def handle(tmp_path: Path) -> Any:
    path = tmp_path / "mine.toml"
    path.write_text('schema = 1\nextends = "default"\nfp32 = ["matmul"]\nfp16 = ["torch.exp"]\nnone = ["softmax"]\n')
    return autoamp.init(device_type="cpu", dtype=torch.float16, lists=str(path))


def test_rule_file_and_line(handle: Any) -> None:
    (found,) = handle.explain("matmul").rules
    rule, names = found
    assert (rule.policy.value, rule.origin.line) == ("fp32", 3)
    assert rule.origin.path.endswith("mine.toml")
    assert {"torch.matmul", "torch.Tensor.matmul"} <= set(names)
    assert "mine.toml:3" in str(handle.explain("matmul"))


def test_a_dotted_rule_holds_for_one_name_alone(handle: Any) -> None:
    rules = {rule.policy.value: names for rule, names in handle.explain("exp").rules}
    assert rules["fp16"] == ("torch.exp",)
    assert "torch.Tensor.exp" in rules["fp32"]
    ((rule, names),) = handle.explain("torch.exp").rules
    assert (rule.policy.value, names) == ("fp16", ("torch.exp",))


def test_what_is_left_alone_and_what_is_on_no_list(handle: Any) -> None:
    ((rule, names),) = handle.explain("softmax").rules
    assert (rule.policy.value, rule.origin.line, names) == ("none", 5, ())
    other: Any = autoamp.init(device_type="cpu", lists={"extends": [], "fp16": ["linear"]})
    assert other.explain("softmax").rules == ()
    assert "on no list" in str(other.explain("softmax"))
    assert other.explain("linear").rules[0][0].target == "linear"


def test_an_in_place_form_goes_by_its_own_policy(handle: Any) -> None:
    ((rule, names),) = handle.explain("addmm_").rules
    assert (rule.policy.value, "torch.Tensor.addmm_" in names) == ("promote", True)


def test_an_unknown_name_is_an_error(handle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"'sofmax' is no op of torch.*did you mean.*'softmax'"):
        handle.explain("sofmax")
    assert main(["lists", "sofmax"]) == 2
    assert "did you mean" in capsys.readouterr().err
