"""Random programs: a recording changes nothing, and a tape that runs again as it was has the same bits."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import autoamp
from autoamp.tensors import iter_tensors
from autoamp.tools.tape import Op, Rerun, Tape, everything, load_tape, record, save_tape
from tests.tools.tape.programs import Program

MODES = ("fp32", "bf16", "fp16", "bf16 weights")


@contextlib.contextmanager
def casting(mode: str) -> Iterator[None]:
    if mode not in ("bf16", "fp16"):
        yield
        return
    dtype = torch.bfloat16 if mode == "bf16" else torch.float16
    handle = autoamp.init(device_type="cpu", dtype=dtype, loss_scale=1.0)
    try:
        yield
    finally:
        handle.deactivate()


def program(seed: int, mode: str) -> Program:
    made = Program(seed)
    return made.bfloat16() if mode == "bf16 weights" else made


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]


def taped(seed: int, mode: str) -> tuple[Program, Tape, list[tuple[Op, list[bytes]]], torch.Tensor]:
    """Record a step, after one that is not recorded, and return what each operator returned."""
    seen: list[tuple[Op, list[bytes]]] = []
    made = program(seed, mode)
    made.loss()
    with record(look=lambda op, results: seen.append((op, [bits(one) for one in iter_tensors(results)]))) as tape:
        loss = made.loss()
    return made, tape, seen, loss


def rerun_bits(tape: Tape) -> list[list[bytes] | None]:
    # oneDNN leaves parts of its workspace as they were.
    return [
        None
        if results is None or op.is_empty or op.name == "aten::mkldnn_rnn_layer"
        else [bits(one) for one in iter_tensors(results)]
        for op, _, results in Rerun(tape)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(15))
def test_recording_changes_nothing_and_a_rerun_has_the_same_bits(seed: int, mode: str, tmp_path: Any) -> None:
    with casting(mode):
        plain = program(seed, mode)
        losses = [bits(plain.loss()), bits(plain.loss())]
        expected, random_states = list(map(bits, plain.written())), states()
        made, tape, seen, loss = taped(seed, mode)
        assert tape.incomplete is None
        assert losses[1] == bits(loss)
        assert list(map(bits, made.written())) == expected
        assert states() == random_states
        again = rerun_bits(tape)
        assert [(op, values) for (op, values), now in zip(seen, again, strict=True) if now not in (None, values)] == []
        # Nothing that the program has was touched by the rerun.
        assert list(map(bits, made.written())) == expected
        assert states() == random_states
        save_tape(tape, tmp_path / "tape")
    assert rerun_bits(load_tape(tmp_path / "tape")) == again


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("seed", range(15))
def test_fp32_rerun_is_what_the_program_computes_in_fp32(seed: int, mode: str) -> None:
    reference = program(seed, mode).float()
    # A sort may differ in fp32. A tensor whose `.data` was replaced goes on counting its writes, so that the next read
    # of it is taken for one of an unknown value, and the run in fp32 starts there from the half value.
    if "chosen" in reference.order or ("data" in reference.order and mode == "bf16 weights"):
        pytest.skip("not comparable")
    torch.manual_seed(1)
    expected = reference.loss()
    with casting(mode):
        made = program(seed, mode)
        torch.manual_seed(1)
        with record() as tape:
            loss = made.loss()
    run = Rerun(tape, everything)
    for op, (args, kwargs), results in run:
        half = {torch.float16, torch.bfloat16} & {one.dtype for one in iter_tensors((args, kwargs, results))}
        assert not half, op
    pairs = [(loss, expected)]
    for ours, theirs in zip(made.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        if ours.grad is not None:
            pairs.append((ours.grad, theirs.grad))
    for ours, theirs in pairs:
        ref = tape.find(ours)
        assert ref is not None
        torch.testing.assert_close(run.value(ref), theirs, rtol=1e-3, atol=1e-8 + 1e-3 * theirs.abs().max().item())
