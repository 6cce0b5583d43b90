"""What the gradients of a scaled loss turned out to be, and which loss scaler hears of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoamp.gradients import found_any
from autoamp.scaling import LossScaler

__all__ = ["Verdict", "read", "settle"]


class Verdict:
    """What one scaled block found in the gradients, read or still on the device.

    Optimizers that share a block share its verdict: they are skipped together, and the scaler hears of it once.

    Args:
        scaler: The scaler of the block.
        scale: The scale that the block used.
        found: What `autoamp.gradients.unscale_` returned.

    Attributes:
        scaler: As given.
        scale: As given.
        found: As given, empty once it was read.
        overflowed: Whether an inf or nan was there; None as long as nobody has read it.
        counted: Whether this verdict was settled.
        cleared: Where all gradients were made 0 after an overflow: some of the tensors whose ``.grad`` had inf or nan.
    """

    __slots__ = ("cleared", "counted", "found", "overflowed", "scale", "scaler")

    def __init__(self, scaler: LossScaler, scale: float, found: Sequence[torch.Tensor]) -> None:
        self.scaler = scaler
        self.scale = scale
        self.found = found
        self.overflowed: bool | None = None
        self.counted = False
        self.cleared: Sequence[torch.Tensor] = ()


def settle(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Read the verdicts of one step, with one device synchronisation, and tell every scaler among them once.

    The first that overflowed is to blame, and its scaler goes lower. Those before it were clean. Those after it say
    nothing, as an inf stays in a gradient that is accumulated, so they are not counted.

    Args:
        verdicts: In the order of the blocks. Those that were settled for another optimizer are not counted again.

    Returns:
        The verdict to blame, None if no gradient overflowed.
    """
    read(verdicts)
    blamed = next((verdict for verdict in verdicts if verdict.overflowed), None)
    clean = verdicts if blamed is None else verdicts[: verdicts.index(blamed)]
    told = {id(verdict.scaler) for verdict in clean if verdict.counted}
    if blamed is not None:
        told.add(id(blamed.scaler))
        if not blamed.counted:
            blamed.scaler.update(True)
    for verdict in clean:
        if id(verdict.scaler) not in told:
            told.add(id(verdict.scaler))
            verdict.scaler.update(False)
    for verdict in verdicts:
        verdict.counted = True
    return blamed


def read(verdicts: Sequence[Verdict]) -> None:
    """Read those verdicts that nobody has read, with one synchronisation of each device, and tell no scaler."""
    unread = [verdict for verdict in verdicts if verdict.overflowed is None]
    if not unread:
        return
    flags = iter(found_any([found for verdict in unread for found in verdict.found]))
    for verdict in unread:
        own = [next(flags) for _ in verdict.found]
        verdict.overflowed = any(own)
        verdict.found = ()
