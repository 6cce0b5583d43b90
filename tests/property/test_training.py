"""Training programs drawn at random: gradients, weights, skips and scales are those of plain torch in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.property import programs

LAYERS = ["second", "norm"]


def setups(*modes: str) -> st.SearchStrategy[programs.Setup]:
    return st.builds(
        programs.Setup,
        mode=st.sampled_from(modes),
        dtype=st.sampled_from([torch.float16, torch.bfloat16]),
        optimizer=st.sampled_from(list(programs.OPTIMIZERS)),
        scale=st.sampled_from(["dynamic", 128.0, 1.0]),
        hooked=st.booleans(),
    )


BACKWARDS = st.builds(
    programs.Backward,
    seed=st.integers(0, 20),
    passes=st.integers(1, 2),
    overflow=st.sampled_from([None] * 5 + ["first", "second", "norm", "late"]),
    delay=st.sampled_from([False] * 5 + [True]),
    look=st.sampled_from([False] * 5 + [True]),
    clear=st.sampled_from([None] * 10 + list(programs.CLEARS)),
    fails=st.sampled_from([False] * 9 + [True]),
)
READS = st.builds(programs.Read, st.booleans())
CLEARINGS = st.builds(programs.Clear, st.sampled_from(list(programs.CLEARS)))
BETWEEN = st.one_of(READS, READS, st.builds(programs.Write, st.sampled_from(list(programs.WRITES))), CLEARINGS)
OTHERS = st.one_of(
    st.builds(programs.Freeze, st.sampled_from(LAYERS)),
    st.just(programs.AddGroup()),
    st.builds(programs.Fill, st.sampled_from(LAYERS), st.sampled_from([0.5, 1.0])),
    st.just(programs.Save()),
    st.just(programs.Load()),
    READS,
)
# A round of training: blocks, what is done with their gradients, the step, and gradients cleared, as a rule.
ROUNDS = st.tuples(
    st.lists(BACKWARDS, min_size=1, max_size=2),
    st.lists(BETWEEN, min_size=1, max_size=3),
    st.lists(st.just(programs.Step()), min_size=0, max_size=1),
    st.lists(CLEARINGS, max_size=2),
    st.lists(OTHERS, max_size=1),
)
PROGRAMS = st.lists(ROUNDS, min_size=1, max_size=4).map(
    lambda rounds: [action for parts in rounds for part in parts for action in part]
)


@pytest.mark.filterwarnings("ignore")
@given(setup=setups("O0", "O1", "O3", "init", "auto_scale"), actions=PROGRAMS)
def test_training_is_that_of_plain_torch(setup: programs.Setup, actions: list[Any]) -> None:
    programs.run(setup, actions)


@pytest.mark.filterwarnings("ignore")
@given(setup=setups("O2", "FP16_Optimizer"), actions=PROGRAMS)
def test_training_with_master_weights_is_that_of_plain_torch(setup: programs.Setup, actions: list[Any]) -> None:
    programs.run(setup, actions)
