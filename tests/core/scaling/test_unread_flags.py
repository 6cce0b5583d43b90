"""Flags that are read later, in order and many at a time; and scales that only the device knows."""

from __future__ import annotations

import pytest
import torch

from autoamp.core import UnreadFlags, is_same_scale

Told = list[tuple[int, bool]]


def filled(values: str, batch: int, device: str = "cpu", **urgent: int) -> tuple[UnreadFlags, Told]:
    """Add a flag for each letter, "x" for an overflow."""
    unread, told = UnreadFlags((device,), batch), Told()
    for place, letter in enumerate(values):
        found = torch.full((1,) * (place % 2), float(letter == "x"), device=device)

        def tell(found: bool, place: int = place) -> None:
            told.append((place, found))

        unread.add(found, tell, urgent=place == urgent.get("at"))
    return unread, told


def expected(values: str) -> Told:
    return [(place, letter == "x") for place, letter in enumerate(values)]


def test_flags_are_reported_in_order_by_full_batches(device: str) -> None:
    values = "x--xx-x"
    unread, told = filled(values, 3, device)
    assert told == expected(values)[: len(told)]
    assert len(unread) == len(values) - len(told) <= 6
    if device == "cpu":
        # Those of a CPU have arrived when the next one comes.
        assert len(told) == 6
    unread.catch_up()
    assert (told, len(unread)) == (expected(values), 0)


def test_an_urgent_flag_is_read_with_those_before_it() -> None:
    assert filled("-x-", 10)[1] == []
    assert filled("-x-", 10, at=1)[1] == expected("-x")


def test_a_flag_that_a_callback_adds_is_reported_after_the_others() -> None:
    unread, told = UnreadFlags(("cpu",)), list[str]()

    def first(found: bool) -> None:
        unread.add(torch.zeros(()), lambda found: told.append("third"), urgent=True)
        unread.catch_up()
        told.append("first")

    unread.add(torch.zeros(()), first)
    unread.add(torch.zeros(()), lambda found: told.append("second"))
    unread.catch_up()
    assert told == ["first", "second"]
    unread.catch_up()
    assert told == ["first", "second", "third"]


def test_a_callback_may_catch_up() -> None:
    unread, told = UnreadFlags(("cpu",)), Told()

    def tell(found: bool) -> None:
        unread.catch_up()
        told.append((len(told), found))

    for letter in "x-x":
        unread.add(torch.tensor(float(letter == "x")), tell)
    unread.catch_up()
    assert told == expected("x-x")


@pytest.mark.parametrize("compiling", [False, True])
def test_blank_flags_share_no_element(monkeypatch: pytest.MonkeyPatch, compiling: bool) -> None:
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: compiling)
    unread = UnreadFlags()
    blanks = [unread.blank(torch.device("cpu")) for _ in range(40)]
    assert {(blank.dtype, blank.item(), tuple(blank.shape)) for blank in blanks} == {(torch.float32, 0.0, (1,))}
    assert len({blank.data_ptr() for blank in blanks}) == 40


def test_which_devices_leave_flags_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not UnreadFlags().serves(torch.device("cpu"))
    assert UnreadFlags().serves(torch.device("cuda", 1))
    # A captured graph would replay the same flags.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not UnreadFlags().serves(torch.device("cuda"))


# -- scales --


def test_scales_on_the_device_are_compared_by_identity() -> None:
    scale = torch.tensor(8.0)
    assert is_same_scale(scale, scale)
    assert is_same_scale(8.0, 8.0)
    assert not is_same_scale(8.0, 4.0)
    # To know it would be to wait.
    assert not is_same_scale(scale, 8.0)
