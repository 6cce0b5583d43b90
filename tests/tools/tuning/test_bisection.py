"""The search for culprits on a program of 60 layers that behaves by a table: what it finds, and in how many runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoamp.tools.tuning import Bisection, Outcome, Proposal, Stopped, units_of
from tests.tools.tuning.planted import survey, use

LAYERS = [use("linear", "fp16", 9, 3, module=f"layers.{number}", module_class="net.Layer") for number in range(60)]


class Program:
    """A program whose metric is 0.5 off for each culprit in half precision.

    Args:
        culprits: The names that must be fp32.
        noise: How far apart the metrics of two seeds are in fp32.
        outcome: What comes of a culprit in half precision, in place of another metric.
        most: After so many runs there is no time.
    """

    def __init__(self, *culprits: str, noise: float = 0.001, outcome: Outcome | None = None, most: int = 99) -> None:
        self.culprits, self.noise, self.outcome, self.most = set(culprits), noise, outcome, most
        self.runs = 0

    def __call__(self, candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
        if self.runs == self.most:
            raise Stopped("the budget was spent")
        self.runs += 1
        wrong = set() if candidate is None else self.culprits - {one.name for one in candidate}
        if wrong and self.outcome is not None:
            return self.outcome
        return Outcome((1.0 + self.noise * seed + 0.5 * len(wrong),))


def searched(program: Program) -> tuple[Bisection, list[str]]:
    search = Bisection(run=program, seeds=(0, 1), units=units_of(survey(*LAYERS)))
    search.search()
    return search, sorted(one.name for one in search.chosen)


@pytest.mark.parametrize(
    "places", [(0,), (31,), (59,), (0, 59), (30, 31), (58, 59), (0, 1, 2), (7, 31, 58), (57, 58, 59)], ids=str
)
@pytest.mark.parametrize(
    "outcome", [None, Outcome((math.nan,)), Outcome((math.nan,), failed="exit code 1: nan")], ids=str
)
def test_culprits_among_60_layers(places: tuple[int, ...], outcome: Outcome | None) -> None:
    program = Program(*(f"layers.{place}" for place in places), outcome=outcome)
    search, found = searched(program)
    assert found == sorted(program.culprits)
    assert search.is_wrong
    assert search.best is not None
    assert search.best.metric == 1.0
    # One more, which looks at what the program calls.
    assert program.runs + 1 <= 12 * len(places)


def test_what_differs_no_more_than_two_seeds_do_is_no_fault() -> None:
    program = Program("layers.3", noise=0.6)
    assert searched(program)[1] == []
    assert program.runs == 3


def test_what_no_layer_restores_is_told_after_one_more_run() -> None:
    program = Program("outside")
    search, found = searched(program)
    assert (found, search.best, program.runs) == ([], None, 4)


@pytest.mark.parametrize("most", range(13))
def test_stopped_anywhere_what_is_known_restores_the_metric(most: int) -> None:
    program = Program("layers.3", "layers.40", most=most)
    search, found = searched(program)
    assert str(search.stopped) == "the budget was spent"
    assert program.culprits <= set(found) if most >= 4 else found == []


def test_culprits_that_depend_on_each_other_come_to_a_list_that_was_run() -> None:
    class Either(Program):
        def __call__(self, candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
            super().__call__(candidate, seed)
            names = None if candidate is None else {one.name for one in candidate}
            # One of a pair in fp32 without the other restores nothing.
            good = names is None or ("layers.5" in names and len(names & {"layers.9", "layers.50"}) != 1)
            return Outcome((1.0 if good else 2.0,))

    program = Either()
    search, found = searched(program)
    assert found
    assert program(search.chosen, 0).metric == 1.0


def test_what_overflows_is_tried_first_though_another_module_hides_it() -> None:
    mul = replace(use("mul", "unlisted", 1, 1, location="net.py:30"), overflow=3)
    layer = replace(LAYERS[5], overflow=2, location="net.py:3")
    units = units_of(survey(*LAYERS[:5], layer, *LAYERS[6:], mul))
    assert [unit[0].name for unit in units[:3]] == ["mul", "layers.5", "layers.0"]
    assert units[1][0].reason == "linear at net.py:3, which overflows"

    class Hidden(Program):
        def __call__(self, candidate: tuple[Proposal, ...] | None, seed: int) -> Outcome:
            super().__call__(candidate, seed)
            # The product overflows, unless its argument comes in fp32.
            good = candidate is None or not {"mul", "layers.0"}.isdisjoint(one.name for one in candidate)
            return Outcome((1.0 if good else math.nan,))

    search = Bisection(run=Hidden(), seeds=(0, 1), units=units)
    search.search()
    assert [(one.name, one.kind, one.reason) for one in search.chosen] == [
        (name, "restores", "mul at net.py:30, which overflows") for name in ("mul", "multiply", "__mul__", "__rmul__")
    ]


def test_the_fewest_calls_come_first_and_an_op_has_those_in_modules_too() -> None:
    units = units_of(
        survey(
            use("linear", "fp16", 9, 3, module="a", module_class="net.A", calls=4),
            use("linear", "fp16", 9, 3, module="b", module_class="net.B", calls=3),
            use("linear", "fp16", 9, 3, module_class="net.Net", calls=1),
            use("mm", "fp16", 9, 3, module_class="net.Net", calls=3),
            use("bmm", "fp16", 9, 3, module_class="net.Net", calls=9, overflow=1),
        )
    )
    assert [unit[0].name for unit in units] == ["bmm", "mm", "net.B", "net.A", "linear"]


def test_candidates_are_modules_by_class_or_path_and_ops_outside_of_them() -> None:
    units = units_of(
        survey(
            use("linear", "fp16", 9, 3, module="head", module_class="net.Head"),
            *LAYERS[:2],
            use("linear", "fp16", 9, 3, module_class="net.Net"),
            use("softmax", "fp32", 9, 3, module_class="net.Net"),
            replace(use("mul", "unlisted", 1, 1), error=0.01),
            replace(use("permute", "unlisted", 1, 1), error=0.0),
        )
    )
    names = [tuple(one.name for one in unit) for unit in units]
    assert names == [
        ("mul", "multiply", "__mul__", "__rmul__"), ("net.Head",), ("layers.0",), ("layers.1",), ("linear",),
    ]  # fmt: skip
    assert [unit[0].of_module for unit in units] == [False, True, True, True, False]
