"""Files of tapes: read without running code, on any machine, and refused in one sentence."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from autoamp.errors import TapeError
from autoamp.tools.tape import CannotRerun, Load, Op, Place, Ref, Rerun, load_tape, record, save_tape


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    data = torch.arange(1_000_000.0)
    with record(lambda: Place("exp", "net.\x1b[31mred", "prog.py:3")) as tape:
        (data[500:504].view(2, 2).to(torch.bfloat16) * torch.rand(2)).exp()
    path = tmp_path / "a.tape"
    save_tape(tape, path)
    return path


def test_file_holds_what_the_step_has_seen_of_its_tensors(saved: Path) -> None:
    assert saved.stat().st_size < 20_000
    names = [op.name for op, _, _ in Rerun(load_tape(saved))]
    assert names == ["aten::_to_copy", "aten::rand", "aten::mul", "aten::exp"]


def test_places_are_those_of_the_step(saved: Path) -> None:
    place = next(load_tape(saved).ops).place
    assert place == Place("exp", "net.\x1b[31mred", "prog.py:3")


def changed(path: Path, change: Any) -> Path:
    found = torch.load(path, weights_only=False)
    change(found)
    torch.save(found, path)
    return path


def first_op(found: Any) -> list[Any]:
    return next(event for event in found["events"] if event[0] == "op")


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("events"), "entry 0 is malformed"),
        (lambda found: found["events"].insert(0, ["load", "x"]), "entry 0 is malformed"),
        (lambda found: first_op(found).__setitem__(1, "aten::nothing\x1b"), r"'aten::nothing\\x1b', which torch"),
        (lambda found: first_op(found).__setitem__(1, "aten::from_file"), "'aten::from_file'"),
        (lambda found: first_op(found).__setitem__(1, "c10d::allreduce_"), "'c10d::allreduce_'"),
        (lambda found: first_op(found).__setitem__(1, "__class__::mro"), "'__class__::mro'"),
        (lambda found: first_op(found)[2].append(("memory_format", "nn")), "is malformed"),
        (lambda found: first_op(found)[2].append(Ref(-1, torch.float32, (1,), (1,), 0)), "is malformed"),
        (lambda found: first_op(found).__setitem__(7, "sideways"), "is malformed"),
    ],
)
def test_damaged_file(saved: Path, change: Any, message: str) -> None:
    with pytest.raises(TapeError, match=message) as caught:
        load_tape(changed(saved, change))
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a file of torch", pickle.dumps(Evil(), 2), pickle.dumps([1], 2)])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tape").write_bytes(content)
    with pytest.raises(TapeError, match="is no tape"):
        load_tape(tmp_path / "a.tape")


def test_pickle_of_a_stranger_runs_nothing(tmp_path: Path) -> None:
    torch.save({"events": [Evil()]}, tmp_path / "a.tape")
    with pytest.raises(TapeError, match="is no tape"):
        load_tape(tmp_path / "a.tape")


def test_reference_beyond_a_memory(saved: Path) -> None:
    def enlarge(found: Any) -> None:
        first_op(found)[2][0] = first_op(found)[2][0]._replace(size=(2**40,), stride=(1,))

    with pytest.raises(CannotRerun, match="larger than its memory"):
        Rerun(load_tape(changed(saved, enlarge))).finish()


def test_tape_that_cannot_run_again_is_not_saved(tmp_path: Path) -> None:
    x = torch.ones(2)
    with record() as tape:
        x * 2
    x.add_(1)
    with pytest.raises(TapeError, match="written to since"):
        save_tape(tape, tmp_path / "a.tape")
    with record() as tape:
        torch.ones(2, 2).to_sparse() * 2
    with pytest.raises(TapeError, match="no memory of its own"):
        save_tape(tape, tmp_path / "a.tape")


def test_every_kind_of_constant(tmp_path: Path) -> None:
    with record() as tape:
        torch.zeros(2, 2, dtype=torch.complex64, device="cpu", layout=torch.strided).add(1j)
        torch.ones(1, 1, 2, 2).clone(memory_format=torch.channels_last).div(3, rounding_mode="floor")
    save_tape(tape, tmp_path / "a.tape")
    events = load_tape(tmp_path / "a.tape").events
    pairs = [(a, b) for a, b in zip(events, tape.events, strict=True) if isinstance(a, Op) and isinstance(b, Op)]
    assert not any(isinstance(event, Load) for event in events)
    for loaded, event in pairs:
        assert (loaded.func, list(loaded.args), loaded.kwargs) == (event.func, list(event.args), event.kwargs)
