"""Flags that are read later, in order and many at a time; and scales that only the device knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoamp.scaling import UnreadFlags, is_same_scale, scale_ratio, scaled_loss

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

SCALES = [2.0**16, 1000.1, 7.0, 1.0, 2.0**126]


@pytest.mark.parametrize("above", SCALES)
@pytest.mark.parametrize("below", SCALES)
def test_a_ratio_is_that_of_the_floats(above: float, below: float) -> None:
    tensors = torch.tensor([above, below])
    exact = tensors[0].item() / tensors[1].item()
    for one in (tensors[0], tensors[0].item()):
        for other in (tensors[1], tensors[1].item()):
            assert float(scale_ratio(one, other)) == exact
            assert float(scale_ratio(one, one)) == 1.0
            assert not is_same_scale(one, other) or above == below


def test_scales_on_the_device_are_compared_by_identity() -> None:
    scale = torch.tensor(8.0)
    assert is_same_scale(scale, scale)
    assert is_same_scale(8.0, 8.0)
    assert not is_same_scale(8.0, 4.0)
    # To know it would be to wait.
    assert not is_same_scale(scale, 8.0)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0**16, 1000.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_scale_on_the_device_multiplies_as_the_float(scale: float, dtype: torch.dtype) -> None:
    loss = torch.tensor([1.37, -2.0], dtype=dtype, requires_grad=True)
    outcomes: list[Any] = []
    for given in (scale, torch.tensor(scale)):
        loss.grad = None
        product = scaled_loss(loss, given)
        product.sum().backward()
        outcomes.append((product.dtype, product.tolist(), loss.grad.tolist()))  # type: ignore[attr-defined]
    assert outcomes[0] == outcomes[1] == (torch.float32, (loss.float() * scale).tolist(), outcomes[0][2])
