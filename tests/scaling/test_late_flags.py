"""Flags that are read later: in order, many at a time, and by one wait for whoever asks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from autoamp.scaling.late_flags import LateFlags


class Post:
    """Sends flags that arrive when the test says so, and counts who waited."""

    def __init__(self) -> None:
        self.parcels: list[list[bool]] = []
        self.arrived = 0
        self.waits = 0

    def send(self, flags: Sequence[Tensor]) -> Parcel:
        self.parcels.append([bool(flag) for flag in flags])
        return Parcel(self, len(self.parcels) - 1)


class Parcel:
    def __init__(self, post: Post, index: int) -> None:
        self.post, self.index = post, index

    def arrived(self) -> bool:
        return self.index < self.post.arrived

    def flags(self) -> list[bool]:
        if not self.arrived():
            self.post.waits += 1
            self.post.arrived = len(self.post.parcels)
        return self.post.parcels[self.index]


def flag(value: bool) -> Tensor:
    return torch.tensor(float(value))


def test_flags_are_told_in_order_once_they_have_arrived() -> None:
    post, told = Post(), []
    late = LateFlags(post.send, batch=2)
    for index, value in enumerate([True, False, False, True, True]):
        late.add(flag(value), lambda found, index=index: told.append((index, found)))
    assert (post.parcels, told, len(late)) == ([[True, False], [False, True]], [], 5)
    post.arrived = 1
    late.poll()
    assert (told, len(late), bool(late)) == ([(0, True), (1, False)], 3, True)
    post.arrived = 2
    late.add(flag(False), lambda found: told.append((5, found)))
    assert told == [(0, True), (1, False), (2, False), (3, True)]
    assert post.waits == 0
    late.catch_up()
    assert told[4:] == [(4, True), (5, False)]
    assert (post.waits, len(late), bool(late)) == (1, 0, False)


def test_an_urgent_flag_takes_the_others_along() -> None:
    post = Post()
    late = LateFlags(post.send, batch=10)
    late.add(flag(False), lambda found: None)
    late.add(flag(True), lambda found: None, urgent=True)
    assert post.parcels == [[False, True]]


def test_more_flags_are_read_by_the_same_wait() -> None:
    post, told = Post(), []
    late = LateFlags(post.send, batch=2)
    for value in (True, False, True):
        late.add(flag(value), told.append)
    assert late.read([flag(True), flag(False)]) == [True, False]
    assert (told, post.waits, len(late)) == ([True, False, True], 1, 0)


def test_what_is_far_behind_is_waited_for() -> None:
    post, told = Post(), []
    late = LateFlags(post.send, batch=4)
    for _ in range(11):
        late.add(flag(False), told.append)
    assert (told, post.waits) == ([], 0)
    late.add(flag(False), told.append)
    assert (len(told), post.waits) == (12, 1)


def test_who_is_told_may_ask_what_is_known_by_then() -> None:
    late = LateFlags(Post().send)
    told: list[int] = []

    def tell(found: bool) -> None:
        late.catch_up()
        late.poll()
        told.append(len(told))

    for _ in range(3):
        late.add(flag(True), tell)
    late.catch_up()
    assert told == [0, 1, 2]


def test_a_cpu_is_not_worth_it() -> None:
    late = LateFlags()
    assert not late.serves(torch.device("cpu"))
    assert late.serves(torch.device("cuda", 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that is waited for")
def test_flags_of_a_device() -> None:
    late, told = LateFlags(batch=2), []
    for value in (0.0, 1.0, 0.0):
        late.add(torch.full((1,), value, device="cuda"), told.append)
    late.catch_up()
    assert told == [False, True, False]


def test_blank_flags_share_no_element_and_many_a_block() -> None:
    late = LateFlags()
    with torch.inference_mode():
        flags = [late.blank(torch.device("cpu")) for _ in range(40)]
    assert len({flag.data_ptr() for flag in flags}) == 40
    assert len({flag.untyped_storage().data_ptr() for flag in flags}) == 3
    for flag in flags[::2]:
        flag.fill_(1.0)
    assert [flag.tolist() for flag in flags] == [[1.0], [0.0]] * 20


def test_a_capture_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not LateFlags().serves(torch.device("cuda"))
