"""What tensors are followed by: identity and version, and no longer than they live."""

from __future__ import annotations

import gc

import torch

from autoamp.diagnostics import CallSite, Row
from autoamp.diagnostics.hints import Flow, hints_of

SITE = CallSite(None, None, None, None, None)


def row(op: str, policy: str = "fp16") -> Row:
    return Row(op, policy, op, "lists=", SITE)


def test_a_write_makes_it_another_activation() -> None:
    flow, one = Flow(), row("one")
    x = torch.ones(2)
    flow.cast(x, x.half(), one)
    x.add_(1)
    flow.cast(x, x.half(), one)
    assert flow.repeats == {}
    flow.cast(x, x.half(), row("two"))
    assert [(count, size) for _, _, count, size in flow.repeats.values()] == [(1, 4)]


def test_parameters_and_other_dtypes_are_no_repeats() -> None:
    flow, one = Flow(), row("one")
    weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    for tensor in (weight, weight):
        flow.cast(tensor, tensor.half(), one)
    flow.cast(x, x.half(), one)
    flow.cast(x, x.bfloat16(), one)
    assert hints_of([], [], flow) == ()


def test_islands_go_through_other_ops_to_a_cast_of_the_program() -> None:
    flow, island = Flow(), row("softmax", "fp32")
    half, full, later = torch.ones(4).half(), torch.ones(4), torch.ones(4)
    flow.ran(island, [half], [full])
    flow.passed([full], [later])
    flow.cast(later, later.half(), None)
    (hint,) = hints_of([], [], flow)
    assert (hint.kind, hint.bytes) == ("fp32 island", 4 * 4 + 4 * 2)
    assert "the program" in hint.figure


def test_what_dies_is_forgotten() -> None:
    flow, rows = Flow(), [row(str(number)) for number in range(50)]
    for one in rows:
        # Most lie where the one before was.
        x = torch.ones(2)
        flow.cast(x, x.half(), one)
    assert flow.repeats == {}
    known = set(map(id, rows))
    del x, one, rows
    gc.collect()
    # What was noted of a tensor refers to its row.
    assert not [found for found in gc.get_objects() if type(found) is Row and id(found) in known]
