"""Flags that a device has set and nobody has read yet, and what is to be done once they are known.

To read a flag is to wait for the device. Where the step itself needs no answer, flags queue up, and are copied to the
host while the program goes on: many at a time, into pinned memory, with an event that tells when they are there. What
is to be done for each is done then, in order. Whoever asks for what depends on them waits, once for all of them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["LateFlags", "Parcel"]

# So many flags are sent together. No more than three times as many are unknown at a time, so skips are counted no more
# than 48 steps late.
_BATCH = 16

# The devices that a program's thread can run ahead of, with copies that go on beside it.
_ASYNCHRONOUS = frozenset(("cuda", "xpu"))


class Parcel(Protocol):
    """Flags on their way to the host."""

    def arrived(self) -> bool:
        """Tell whether they are there."""

    def flags(self) -> list[bool]:
        """Return them; wait until they are there."""


class _PinnedCopy:
    """A `Parcel` by way of pinned memory."""

    def __init__(self, flags: Sequence[Tensor]) -> None:
        device = flags[0].device
        values = torch.stack([flag.to(device, non_blocking=True).view(()) for flag in flags])
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.Event(device=device)
        self._event.record(torch.accelerator.current_stream(device))

    def arrived(self) -> bool:
        return self._event.query()

    def flags(self) -> list[bool]:
        if not self._event.query():
            self._event.synchronize()
        return [bool(value) for value in self._host.tolist()]


def _is_worth_it(device: torch.device) -> bool:
    if device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        # A captured graph would read the same flags, and use the same scale, at each replay.
        return False
    return device.type in _ASYNCHRONOUS


class LateFlags:
    """A queue of flags with what is to be done with each.

    Args:
        send: Sends flags, tensors of one element, to the host. To pinned memory by default.
        serves: Tells whether flags on a device are worth it. Those on a CPU are read at no price.
        batch: So many flags are sent together.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Tensor]], Parcel] = _PinnedCopy,
        serves: Callable[[torch.device], bool] = _is_worth_it,
        batch: int = _BATCH,
    ) -> None:
        self.serves = serves
        self._send = send
        self._batch = batch
        self._here: list[tuple[Tensor, Callable[[bool], None]]] = []
        self._sent: deque[tuple[Parcel, list[Callable[[bool], None]]]] = deque()
        self._telling = False
        self._blank: dict[torch.device, list[Tensor]] = {}

    def __len__(self) -> int:
        """Return how many flags are not known yet."""
        return len(self._here) + sum(len(told) for _, told in self._sent)

    def __bool__(self) -> bool:
        return bool(self._here or self._sent)

    def blank(self, device: torch.device) -> Tensor:
        """Return a flag that is not set: one fp32 element, 0. Many are made at once, as parts of one tensor."""
        if torch.compiler.is_dynamo_compiling():
            # Code would be compiled anew for each number of parts that are left.
            return torch.zeros(1, dtype=torch.float32, device=device)
        if not self._blank.get(device):
            with torch.inference_mode(False):
                self._blank[device] = list(torch.zeros(_BATCH, dtype=torch.float32, device=device).split(1))
        return self._blank[device].pop()

    def add(self, flag: Tensor, tell: Callable[[bool], None], *, urgent: bool = False) -> None:
        """Take a flag, and whom to tell of it. Flags are told in order, and those that have arrived are told now.

        Args:
            flag: A tensor of one element that is written to no more.
            tell: Called once the flag is known. It raises nothing.
            urgent: Send it now, with all that wait.
        """
        self._here.append((flag, tell))
        if urgent or len(self._here) >= self._batch:
            self._send_all()
        self.poll()

    def poll(self) -> None:
        """Tell what has arrived. Waits only where the device is so far behind that too much is on its way."""
        while self._sent and not self._telling and (self._is_far_behind() or self._sent[0][0].arrived()):
            self._tell_first()

    def catch_up(self) -> None:
        """Wait until all is known, and tell it. Does nothing while something is being told."""
        if self._telling:
            return
        self._send_all()
        while self._sent:
            self._tell_first()

    def read(self, flags: Sequence[Tensor]) -> list[bool]:
        """Catch up, and return what more flags say, by the same wait."""
        values = [False] * len(flags)
        for index, flag in enumerate(flags):
            self.add(flag, functools.partial(values.__setitem__, index))
        self.catch_up()
        return values

    def _is_far_behind(self) -> bool:
        return sum(len(told) for _, told in self._sent) > 2 * self._batch

    def _send_all(self) -> None:
        if self._here:
            flags, told = zip(*self._here, strict=True)
            self._here = []
            self._sent.append((self._send(flags), list(told)))

    def _tell_first(self) -> None:
        parcel, told = self._sent.popleft()
        self._telling = True
        try:
            for tell, flag in zip(told, parcel.flags(), strict=True):
                tell(flag)
        finally:
            self._telling = False
