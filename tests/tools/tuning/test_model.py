"""The cost model on planted tables: what it changes, what it leaves, and the list file that is written."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from autoamp.core import CastPolicy, load_table
from autoamp.tools.tuning import Proposal, list_text, proposals_of
from autoamp.tools.tuning.model import Use
from tests.tools.tuning.planted import survey, use

MUL = ("__mul__", "__rmul__", "mul", "multiply")
BAD = use("linear", "fp16", 100, 50, overflow=1, module_class="net.Head")
GOOD = use("linear", "fp16", 1000, 500, module_class="net.Block")
GATE = use("mul", "unlisted", 0, 0, overflow=4, module_class="net.Gate", seconds={})
SCORES = use("__matmul__", "fp16", 100, 50, overflow=4, module_class="net.Scores")


def changes(*uses, **how):
    return {one.name: (one.value, one.kind) for one in proposals_of(survey(*uses), **how)}


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        # Its casts decide whether it pays.
        ([use("linear", "fp16", 100, 90, casts=50)], {}),
        ([use("softmax", "fp32", 100, 80, casts=30)], {}),
        ([use("softmax", "fp32", 100, 40, casts=10)], {"softmax": ("fp16", "profitable")}),
        # Whether it is safe is unknown.
        ([use("softmax", "fp32", 100, 40, error=None)], {}),
        ([use("softmax", "fp32", 100, 140)], {}),
        # It is in fp32 already.
        ([use("exp", "fp32", 100, 50, overflow=3)], {}),
        # The error of what no list casts is that of its arguments.
        ([use("sub", "promote", 100, 50, error=3.0), use("mul", "unlisted", 100, 50, error=3.0)], {}),
        # It takes no time.
        ([use("linear", "fp16", 1000, 500), use("dot", "fp16", 1, 2)], {}),
        # torch's own class would mean all modules of it.
        ([replace(BAD, module_class="torch.nn.Linear"), GOOD], {"linear": ("fp32", "unsafe")}),
        ([BAD, GOOD], {"net.Head": ("fp32", "unsafe")}),
        # Half precision pays nowhere else.
        ([BAD, use("linear", "fp16", 500, 1000)], {"linear": ("fp32", "unsafe")}),
        # The list has `__matmul__`: a rule on `matmul` would not act.
        ([SCORES], {"__matmul__": ("fp32", "unsafe")}),
        ([SCORES, use("__matmul__", "fp16", 1000, 500)], {"net.Scores": ("fp32", "unsafe")}),
        ([use("__matmul__", "fp16", 100, 700)], {"__matmul__": ("fp32", "unprofitable")}),
        # An op on no list is in fp32 in a class alone if it is called elsewhere, and nothing that pays is in the class.
        ([GATE, replace(GATE, overflow=0, module_class="net.Block")], {"net.Gate": ("fp32", "unsafe")}),
        ([GATE], dict.fromkeys(MUL, ("fp32", "unsafe"))),
        (
            [GATE, replace(GATE, overflow=0, module_class="net.Block"), replace(GOOD, module_class="net.Gate")],
            dict.fromkeys(MUL, ("fp32", "unsafe")),
        ),
    ],
)
def test_changes_of_a_list(uses: list[Use], expected: dict[str, tuple[str, str]]) -> None:
    assert changes(*uses) == expected


def test_an_op_that_overflows_goes_to_fp32_whatever_it_costs() -> None:
    tiny = replace(use("mul", "unlisted", 0, 0, overflow=3), seconds={})
    found = {one.name: one for one in proposals_of(survey(use("linear", "fp16", 100, 50), tiny))}
    # `y * y` and `torch.mul(y, y)` look alike where no list has the op, and a rule on one does not act on the other.
    assert sorted(found) == list(MUL)
    for one in found.values():
        assert (one.value, one.kind) == ("fp32", "unsafe")
        assert one.reason == "3 of its arguments and results overflow in float16 at net.py:7, up to 2^18"


def test_an_op_with_a_large_error_goes_to_fp32() -> None:
    inexact = use("linear", "fp16", 100, 50, error=0.2)
    assert changes(inexact) == {"linear": ("fp32", "unsafe")}
    assert changes(inexact, max_error=0.3) == {}
    assert "inf or nan" in proposals_of(survey(use("linear", "fp16", 100, 50, error=math.inf)))[0].reason


def test_an_op_that_does_not_pay_goes_to_fp32() -> None:
    found = proposals_of(
        survey(use("conv2d", "fp16", 25, 175, calls=4), use("linear", "fp16", 1000, 500, casts=10), steps=2)
    )
    assert [(one.name, one.value, one.kind) for one in found] == [("conv2d", "fp32", "unprofitable")]
    assert found[0].reason == "does not pay on cpu: fp32 50 us, float16 350 us, with casts 350 us a step"


def test_an_op_that_cannot_be_run_in_half_goes_to_fp32() -> None:
    (found,) = proposals_of(survey(replace(use("linear", "fp16", 0, 0), seconds={"fp32": 1e-4})))
    assert (found.value, found.reason) == ("fp32", "it cannot be run in float16 on cpu")


def test_two_unsafe_ops_of_one_class_are_one_entry() -> None:
    ops = [use(op, "fp16", 100, 50, module_class="net.Head", overflow=3) for op in ("bmm", "conv1d")]
    ops += [use(op, "fp16", 100, 50, module_class="net.Body") for op in ("bmm", "conv1d")]
    (found,) = proposals_of(survey(*ops))
    assert (found.name, found.value, found.of_module) == ("net.Head", "fp32", True)
    assert found.reason.startswith("bmm is unsafe in this class, and pays elsewhere: 3 of its arguments and results")
    assert "; conv1d is unsafe in this class" in found.reason


PROPOSALS = (
    Proposal("softmax", "fp16", "profitable", "40 us, 100 us"),
    Proposal("mul", "fp32", "unsafe", "5 overflow\nat 'net.py':7 \x00 # \u20ac"),
    Proposal("add", "fp32", "unsafe", "6 overflow"),
    Proposal("conv2d", "fp32", "unprofitable", "does not pay"),
    Proposal("net.Head", "fp32", "unsafe", "linear is unsafe", of_module=True),
)


def test_entries_have_their_policies_and_reasons(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    text = list_text(PROPOSALS, ["bf16"], ["Written by autoamp tune.", "", "two\nlines"])
    path.write_text(text, encoding="utf-8")
    assert tomllib.loads(text) == {
        "schema": 1,
        "extends": ["bf16"],
        "fp16": ["softmax"],
        "fp32": ["add", "conv2d", "mul"],
        "modules": {"net.Head": "fp32"},
    }
    assert '"softmax",  # profitable: 40 us, 100 us' in text
    assert "# unsafe: 5 overflow at 'net.py':7   # \u20ac" in text
    table = load_table(str(path), start=tmp_path, environ={})
    rule = table.policy_of("mul")
    assert rule is not None
    assert (rule.policy, rule.origin.path) == (CastPolicy.FP32, str(path))


def test_without_entries_it_is_a_list_still() -> None:
    assert tomllib.loads(list_text((), comments=["nothing pays"])) == {"schema": 1}
