"""The cost model on planted tables: what it changes, and what it leaves."""

from __future__ import annotations

import math
from dataclasses import replace

from autoamp.tuning import proposals_of
from tests.tuning.planted import survey, use


def changes(*uses, **how):
    return {one.name: (one.value, one.kind) for one in proposals_of(survey(*uses), **how)}


def test_an_op_that_overflows_goes_to_fp32_whatever_it_costs() -> None:
    tiny = replace(use("mul", "unlisted", 0, 0, overflow=3), seconds={})
    found = {one.name: one for one in proposals_of(survey(use("linear", "fp16", 100, 50), tiny))}
    # `y * y` and `torch.mul(y, y)` look alike where no list has the op, and a rule on one does not act on the other.
    assert sorted(found) == ["__mul__", "__rmul__", "mul", "multiply"]
    for one in found.values():
        assert (one.value, one.kind) == ("fp32", "unsafe")
        assert one.reason == "3 of its arguments and results overflow in float16 at net.py:7, up to 2^18"


def test_an_op_with_a_large_error_goes_to_fp32() -> None:
    inexact = use("linear", "fp16", 100, 50, error=0.2)
    assert changes(inexact) == {"linear": ("fp32", "unsafe")}
    assert changes(inexact, max_error=0.3) == {}
    assert "inf or nan" in proposals_of(survey(use("linear", "fp16", 100, 50, error=math.inf)))[0].reason


def test_the_error_of_what_no_list_casts_is_none_of_its_own() -> None:
    assert changes(use("sub", "promote", 100, 50, error=3.0), use("mul", "unlisted", 100, 50, error=3.0)) == {}


def test_what_is_in_fp32_already_is_not_proposed() -> None:
    assert changes(use("exp", "fp32", 100, 50, overflow=3)) == {}


def test_an_op_that_does_not_pay_is_left_alone() -> None:
    found = proposals_of(survey(use("conv2d", "fp16", 100, 700), use("linear", "fp16", 1000, 500, casts=10), steps=2))
    assert [(one.name, one.value, one.kind) for one in found] == [("conv2d", "none", "unprofitable")]
    assert found[0].reason == "does not pay on cpu: fp32 50 us, float16 350 us, with casts 350 us a step"


def test_an_op_whose_casts_decide_whether_it_pays_stays_as_the_lists_have_it() -> None:
    assert changes(use("linear", "fp16", 100, 90, casts=50)) == {}
    assert changes(use("softmax", "fp32", 100, 80, casts=30)) == {}


def test_an_op_that_cannot_be_run_in_half_is_left_alone() -> None:
    (found,) = proposals_of(survey(replace(use("linear", "fp16", 0, 0), seconds={"fp32": 1e-4})))
    assert (found.value, found.reason) == ("none", "it cannot be run in float16 on cpu")


def test_a_safe_op_that_pays_goes_to_half() -> None:
    assert changes(use("softmax", "fp32", 100, 40, casts=10)) == {"softmax": ("fp16", "profitable")}
    assert changes(use("softmax", "fp32", 100, 40, error=None)) == {}
    assert changes(use("softmax", "fp32", 100, 140)) == {}


def test_an_op_that_is_unsafe_in_one_class_alone_goes_to_fp32_there() -> None:
    bad = use("linear", "fp16", 100, 50, overflow=1, module_class="net.Head")
    good = use("linear", "fp16", 1000, 500, module_class="net.Block")
    (found,) = proposals_of(survey(bad, good))
    assert (found.name, found.value, found.of_module) == ("net.Head", "fp32", True)
    assert found.reason.startswith("linear is unsafe in this class, and pays elsewhere: 1 of its arguments and results")
    # Torch's own class would mean all of it, and where it pays nowhere else there is nothing to keep.
    assert changes(replace(bad, module_class="torch.nn.Linear"), good) == {"linear": ("fp32", "unsafe")}
    assert changes(bad, use("linear", "fp16", 500, 1000)) == {"linear": ("fp32", "unsafe")}


def test_two_unsafe_ops_of_one_class_are_one_entry() -> None:
    ops = [use(op, "fp16", 100, 50, module_class="net.Head", overflow=3) for op in ("bmm", "conv1d")]
    ops += [use(op, "fp16", 100, 50, module_class="net.Body") for op in ("bmm", "conv1d")]
    (found,) = proposals_of(survey(*ops))
    assert (found.name, found.value, found.of_module) == ("net.Head", "fp32", True)
    assert "bmm is unsafe in this class" in found.reason
    assert "; conv1d is unsafe in this class" in found.reason


def test_an_operator_on_a_list_is_named_as_that_list_has_it() -> None:
    """By op, and by class: the list has ``__matmul__``, so that a rule on ``matmul`` would not act."""
    bad = use("__matmul__", "fp16", 100, 50, overflow=4, module_class="net.Scores")
    good = use("__matmul__", "fp16", 1000, 500, module_class="net.Block")
    assert changes(bad) == {"__matmul__": ("fp32", "unsafe")}
    assert changes(bad, good) == {"net.Scores": ("fp32", "unsafe")}
    assert changes(use("__matmul__", "fp16", 100, 700)) == {"__matmul__": ("none", "unprofitable")}


def test_an_op_on_no_list_that_is_unsafe_in_one_class_alone_goes_to_fp32_there() -> None:
    bad = replace(use("mul", "unlisted", 0, 0, overflow=4, module_class="net.Gate"), seconds={})
    good = replace(use("mul", "unlisted", 0, 0, module_class="net.Block"), seconds={})
    (found,) = proposals_of(survey(bad, good))
    assert (found.name, found.value, found.of_module) == ("net.Gate", "fp32", True)
    # A class whose other ops pay in half keeps them there.
    inner = use("linear", "fp16", 1000, 500, module_class="net.Gate")
    assert set(changes(bad, good, inner)) == {"__mul__", "__rmul__", "mul", "multiply"}
    # Where it is called nowhere else there is nothing to keep.
    assert set(changes(bad)) == {"__mul__", "__rmul__", "mul", "multiply"}


def test_small_ops_are_left_as_they_are() -> None:
    assert changes(use("linear", "fp16", 1000, 500), use("dot", "fp16", 1, 2)) == {}


def test_a_total_is_of_all_calls() -> None:
    one = use("linear", "fp16", 3, 2, calls=4)
    assert one.total("fp32") == 4 * 3e-6
    assert one.total("unknown") is None
    assert replace(one, seconds={}).total("fp32") is None
