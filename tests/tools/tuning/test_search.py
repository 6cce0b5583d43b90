"""The search on a program that behaves by a planted table: what it takes, in which order, and stopped anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoamp.tools.tuning import Outcome, Proposal, Search, Stopped, proposals_of
from tests.tools.tuning.planted import Program, survey, use

PLANTED = survey(
    use("hypot", "unlisted", 1, 1, overflow=5),
    use("conv2d", "fp16", 100, 700, casts=10),
    use("linear", "fp16", 1000, 500, casts=10),
    use("layer_norm", "fp32", 100, 90, casts=2),
    use("softmax", "fp32", 50, 20, casts=5),
)
ALL = {"hypot": "fp32", "conv2d": "fp32", "layer_norm": "fp16", "softmax": "fp16"}


def searched(run: Callable[..., Outcome], **how: object) -> Search:
    search = Search(run=run, proposals=proposals_of(PLANTED), seeds=(0, 1), **how)  # type: ignore[arg-type]
    search.search()
    return search


def entries(result: Search) -> dict[str, str]:
    return {one.name: one.value for one in result.chosen}


def test_all_that_is_sure_is_tried_at_once() -> None:
    program = Program(PLANTED)
    result = searched(program)
    assert entries(result) == ALL
    assert (result.rejected, result.untried, result.stopped) == ([], [], None)
    # fp32 with two seeds; the lists as they are, whose loss is nan, with one; unsafe ops, and all changes, with two.
    assert [seed for _, seed in program.runs] == [0, 1, 0, 0, 1, 0, 1]
    assert program.runs[0][0] is None
    assert program.runs[2][0] == ()
    assert any("pays on this device: a step takes 0.5" in line for line in result.summary(PLANTED, "loss"))


def test_what_harms_the_metric_is_not_taken() -> None:
    result = searched(Program(PLANTED, harms={("softmax", "fp16")}))
    assert entries(result) == {name: value for name, value in ALL.items() if name != "softmax"}
    ((proposal, why),) = result.rejected
    assert proposal.name == "softmax"
    assert why == "the metric is 1.5005, in fp32 0.5005, and 0.01 is allowed"


def test_a_change_that_fails_is_not_taken() -> None:
    result = searched(Program(PLANTED, fails={("conv2d", "fp32")}))
    assert entries(result) == {name: value for name, value in ALL.items() if name != "conv2d"}
    ((proposal, why),) = result.rejected
    assert (proposal.name, why) == ("conv2d", "the program failed: exit code 1: RuntimeError: expected Float")


def test_what_is_slower_in_the_program_than_in_the_model_is_not_taken() -> None:
    program = Program(PLANTED)

    def run(candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
        found = program(candidate, seed)
        slow = candidate is not None and any(one.name == "softmax" for one in candidate)
        return Outcome(found.metrics, 1.0 if slow and found.seconds is not None else found.seconds)

    result = searched(run)
    assert result.best is not None
    assert "softmax" not in entries(result)
    ((proposal, why),) = result.rejected
    assert (proposal.name, why.partition(",")[0]) == ("softmax", "a step takes 1e+03 ms")


@pytest.mark.parametrize("last", range(9))
def test_stopped_anywhere_it_has_the_best_so_far_and_says_what_it_has_not_tried(last: int) -> None:
    program = Program(PLANTED, harms={("softmax", "fp16")})

    def run(candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
        if len(program.runs) == last:
            raise Stopped("the budget was spent")
        return program(candidate, seed)

    result = searched(run)
    assert result.stopped is not None
    assert entries(result)["hypot"] == "fp32"
    known = {one.name for one in (*result.chosen, *result.untried)} | {one.name for one, _ in result.rejected}
    assert known == set(ALL)
    if result.best is None:
        assert {one.name for one in result.untried} == set(ALL)
    text = "\n".join(result.summary(PLANTED, "loss"))
    assert "stopped early: the budget was spent" in text
    # What is unsafe stays, with a run or without.
    assert all(f"not tried: {one.name}" in text for one in result.untried if one not in result.chosen)
    assert ("no run has confirmed" in text) is (result.best is None)


def test_a_higher_metric_may_be_better() -> None:
    def run(candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
        return Outcome((0.5 if candidate is None else 0.9,), 1.0)

    assert searched(run, higher_is_better=True).best is not None
    assert searched(run).best is None
    assert searched(run, tolerance=1.0).best is not None


def test_the_summary_says_that_half_precision_does_not_pay() -> None:
    slow = survey(use("linear", "fp16", 100, 700))
    program = Program(slow)
    search = Search(run=program, proposals=proposals_of(slow), seeds=(0,))
    assert any("pays on this device is unknown" in line for line in search.summary(slow, "loss"))
    search.search()
    assert entries(search) == {"linear": "fp32"}
    lines = search.summary(slow, "loss")
    pays = (
        "half precision does not pay for this program: a step takes 1.00 times as long as in fp32, although this list "
        "casts no op to half precision: the rest is autoamp's own time for each call"
    )
    assert lines[lines.index(pays) + 1] == "for speed, run this program without autoamp on this device"
    search.chosen = ()
    assert any(
        "does not pay for this program: " in line and "as casts and" in line for line in search.summary(slow, "")
    )
