"""Training programs drawn at random: gradients, weights, skips and scales are those of plain torch in fp32."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.property.programs import (
    CLEARS,
    OPTIMIZERS,
    WRITES,
    AddGroup,
    Backward,
    Clear,
    Fill,
    Freeze,
    Load,
    Read,
    Save,
    Setup,
    Step,
    Write,
    run,
)

LAYERS = ["second", "norm"]


def setups(*modes: str) -> st.SearchStrategy[Setup]:
    return st.builds(
        Setup,
        mode=st.sampled_from(modes),
        dtype=st.sampled_from([torch.float16, torch.bfloat16]),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        scale=st.sampled_from(["dynamic", 128.0, 1.0]),
        hooked=st.booleans(),
    )


BACKWARDS = st.builds(
    Backward,
    seed=st.integers(0, 20),
    passes=st.integers(1, 2),
    overflow=st.sampled_from([None] * 5 + ["first", "second", "norm", "late"]),
    delay=st.sampled_from([False] * 5 + [True]),
    look=st.sampled_from([False] * 5 + [True]),
    clear=st.sampled_from([None] * 10 + list(CLEARS)),
    fails=st.sampled_from([False] * 9 + [True]),
)
READS = st.builds(Read, st.booleans())
CLEARINGS = st.builds(Clear, st.sampled_from(list(CLEARS)))
BETWEEN = st.one_of(READS, READS, st.builds(Write, st.sampled_from(list(WRITES))), CLEARINGS)
OTHERS = st.one_of(
    st.builds(Freeze, st.sampled_from(LAYERS)),
    st.just(AddGroup()),
    st.builds(Fill, st.sampled_from(LAYERS), st.sampled_from([0.5, 1.0])),
    st.just(Save()),
    st.just(Load()),
    READS,
)
# A round of training: blocks, what is done with their gradients, the step, and gradients cleared, as a rule.
ROUNDS = st.tuples(
    st.lists(BACKWARDS, min_size=1, max_size=2),
    st.lists(BETWEEN, min_size=1, max_size=3),
    st.lists(st.just(Step()), min_size=0, max_size=1),
    st.lists(CLEARINGS, max_size=2),
    st.lists(OTHERS, max_size=1),
)
PROGRAMS = st.lists(ROUNDS, min_size=1, max_size=4).map(
    lambda rounds: [action for parts in rounds for part in parts for action in part]
)


@given(setup=setups("O0", "O1", "O3", "init", "auto_scale"), actions=PROGRAMS)
def test_training_is_that_of_plain_torch(setup: Setup, actions: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(setup, actions)


@given(setup=setups("O2", "FP16_Optimizer"), actions=PROGRAMS)
def test_training_with_master_weights_is_that_of_plain_torch(setup: Setup, actions: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(setup, actions)
