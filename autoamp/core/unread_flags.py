"""Flags of overflows that only the device knows, and what the host does once it has read them.

To read a flag is to wait for the device. Where a step needs no answer, flags collect here. Each full batch is copied to
pinned memory while the program goes on, and is read once it has arrived, or when the next batch is full. A caller who
asks for what depends on a flag waits, once for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Scale: TypeAlias = float | Tensor
"""A loss scale: a number, or where only the device knows it an fp32 tensor without dimensions that stays as it is."""

Factor: TypeAlias = float | Tensor
"""What gradients are multiplied by: a number, or an fp64 tensor without dimensions."""

# The devices whose work a program's thread can run ahead of.
_ASYNCHRONOUS = frozenset(("cuda", "xpu"))


class _Sent(NamedTuple):
    """Flags on their way to the host, with the event that follows the copy and what is to be called for each."""

    values: Tensor
    event: Any
    tells: list[Callable[[bool], None]]


class UnreadFlags:
    """Flags in the order of their steps, each with what is to be called once it is known.

    Args:
        device_types: Flags on these are worth leaving unread. Those on a CPU cost nothing to read.
        batch: So many flags are copied together. At most twice as many are unread at a time.

    Attributes:
        lock: Taken while flags come and go, and by the scaler that they are for while it moves.
    """

    def __init__(self, device_types: Collection[str] = _ASYNCHRONOUS, batch: int = 16) -> None:
        self.lock = threading.RLock()
        self._device_types = device_types
        self._batch = batch
        self._here: list[tuple[Tensor, Callable[[bool], None]]] = []
        self._blank: dict[torch.device, list[Tensor]] = {}
        self._sent: _Sent | None = None
        self._telling = False

    def __len__(self) -> int:
        """Return how many flags are not known yet."""
        return len(self._here) + (0 if self._sent is None else len(self._sent.tells))

    def serves(self, device: torch.device) -> bool:
        """Whether flags on a device are left unread. A captured CUDA graph would replay the same flags."""
        if device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return False
        return device.type in self._device_types

    def blank(self, device: torch.device) -> Tensor:
        """Return a flag that is not set: one fp32 element, 0. Many are made at once, as parts of one tensor."""
        if torch.compiler.is_dynamo_compiling():
            # Code would be compiled anew for each number of parts that are left.
            return torch.zeros(1, dtype=torch.float32, device=device)
        with self.lock:
            if not self._blank.get(device):
                with torch.inference_mode(False):
                    self._blank[device] = list(torch.zeros(16, dtype=torch.float32, device=device).split(1))
            return self._blank[device].pop()

    def add(self, found_inf: Tensor, tell: Callable[[bool], None], *, urgent: bool = False) -> None:
        """Take the flag of a step. Flags that have arrived are told now.

        Args:
            found_inf: One element, not 0 for an overflow. Nobody writes to it any more.
            tell: Called with whether the step overflowed, in the order of the steps. It raises nothing.
            urgent: Whether to copy it to the host without waiting for a full batch.
        """
        with self.lock:
            self._here.append((found_inf, tell))
            if self._telling:
                return
            is_full = len(self._here) >= self._batch
            if self._sent is not None and (is_full or self._sent.event is None or self._sent.event.query()):
                self._read_sent()
            if self._sent is None and (is_full or urgent):
                self._send()

    def catch_up(self) -> None:
        """Wait until all flags are known, and call what waits for them. Does nothing while it is at that."""
        # Asked first: compiled code takes no lock.
        if len(self):
            with self.lock:
                if not self._telling:
                    self._read_sent()
                    self._send()
                    self._read_sent()

    def _send(self) -> None:
        if not self._here:
            return
        flags, tells = [flag for flag, _ in self._here], [tell for _, tell in self._here]
        self._here = []
        device = flags[0].device
        values = torch.stack([flag.to(device, non_blocking=True).view(()) for flag in flags])
        if device.type == "cpu":
            self._sent = _Sent(values, None, tells)
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.Event(device=device)
        event.record(torch.accelerator.current_stream(device))
        self._sent = _Sent(host, event, tells)

    def _read_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        if sent.event is not None and not sent.event.query():
            sent.event.synchronize()
        self._telling = True
        try:
            for tell, value in zip(sent.tells, sent.values.tolist(), strict=True):
                tell(bool(value))
        finally:
            self._telling = False


def scaled_loss(loss: Tensor, scale: Scale) -> Tensor:
    """Return ``loss.float() * scale``, of the loss's shape and in fp32. Waits for nothing."""
    if isinstance(scale, Tensor):
        return loss.float() * scale.to(loss.device, non_blocking=True)
    return loss.float() * scale if scale != 1.0 else loss.float()


def is_same_scale(one: Scale, other: Scale) -> bool:
    """Tell for sure, and without waiting, that two scales are the same."""
    return one is other or (isinstance(one, float) and isinstance(other, float) and one == other)


def inverse_scale(scale: Scale) -> Factor:
    """Return ``1 / scale``."""
    return scale.double().reciprocal() if isinstance(scale, Tensor) else 1.0 / scale


def scale_ratio(above: Scale, below: Scale) -> Factor:
    """Return ``above / below``."""
    if isinstance(above, Tensor) or isinstance(below, Tensor):
        device = above.device if isinstance(above, Tensor) else below.device  # type: ignore[union-attr]
        as_doubles = [torch.as_tensor(scale, dtype=torch.float64).to(device) for scale in (above, below)]
        return as_doubles[0] / as_doubles[1]
    return above / below
