"""Who agrees, and by what numbers, on one rank. With really spawned ranks: tests/integration/test_agreement.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoamp.errors import UsageError
from autoamp.scaling.agreement import Agreements, AskedGroup, Ballot, Together, packed, unpacked


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_plain_parameters_ask_nobody() -> None:
    assert Agreements().among([nn.Parameter(torch.ones(1))], None) is None


def test_a_group_needs_a_process_group() -> None:
    with pytest.raises(UsageError, match="no process group yet"):
        AskedGroup.of(None, None)


@pytest.mark.usefixtures("one_process")
def test_what_was_asked_for_is_found_and_remembered() -> None:
    asked = AskedGroup.of(dist.group.WORLD, None)
    assert asked.replicas == 1
    with pytest.raises(UsageError, match="does not divide the 1 ranks"):
        AskedGroup.of(dist.group.WORLD, 2)
    agreements, params = Agreements(), [nn.Parameter(torch.ones(1))]
    together = agreements.among(params, asked)
    assert together is not None
    assert together.asked
    assert together.group is dist.group.WORLD
    assert agreements.among(params, asked) is together
    assert agreements.among(params, None) is None


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("count", [1, 3, 40])
def test_each_verdict_has_a_number_of_its_own(count: int) -> None:
    together = Together(dist.group.WORLD, torch.device("cpu"), 1, asked=True)
    bad = count - 1
    found = [[torch.tensor([float(place == bad)]), torch.zeros(1)] for place in range(count)]
    ballot = Ballot(found, [], votes=True, norm=torch.tensor(7.0)).cast(together)
    flags = [bool(ballot.verdict(place)) for place in range(count)]
    # More than there is room for share the last number.
    assert flags == [place == bad or (count > 28 and place >= 27) for place in range(count)]
    assert bool(ballot.now)
    assert float(ballot.norm) == 7.0
    assert ballot.has_voters()
    assert not ballot.is_hopeless()
    silent = Ballot([], [torch.zeros(1)], votes=False, hopeless=True).cast(together)
    assert not silent.has_voters()
    assert silent.is_hopeless()
    assert not bool(silent.now)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 15, 63, 64, 1000, 100_000])
def test_what_ranks_say_is_told_apart_in_sums(ranks: int) -> None:
    places = len(unpacked(packed([], ranks), ranks))
    # Three, and twelve verdicts at least; and few numbers, since a sum takes a while for each.
    assert places >= 15
    assert len(packed([], ranks)) <= (1 if ranks <= 7 else 2 if ranks <= 63 else 5)
    said = [place % 3 == 0 for place in range(places)]
    # All say yes to these, and one of them to the last too.
    sums = [ranks * one for one in packed(said, ranks)]
    assert unpacked(sums, ranks) == [float(yes) for yes in said]
    alone = packed([False] * (places - 1) + [True], ranks)
    assert unpacked([a + b for a, b in zip(alone, packed([], ranks), strict=True)], ranks)[-1] == 1.0
    assert all(number.is_integer() and number * ranks < 2**53 for number in packed([True] * places, ranks))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_says_nothing_of_the_rest(value: float) -> None:
    together = Together(dist.group.WORLD, torch.device("cpu"), 1, asked=True)
    ballot = Ballot([[torch.ones(1)], [torch.zeros(1)]], [], votes=True, norm=torch.tensor(value)).cast(together)
    assert not ballot.norm.isfinite()
    assert [float(ballot.verdict(place)) for place in (0, 1)] == [1.0, 0.0]
    assert not ballot.is_hopeless()
