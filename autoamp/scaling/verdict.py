"""Whether the gradients of a scaled loss overflowed, read or still on the device, and which loss scaler is told.

Verdicts collect from block to block. A step settles them: it reads them, or hands their flags on unread where optimizer
and scaler can go by them on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autoamp.scaling.device_scale import Scale
from autoamp.scaling.gradients import found_any
from autoamp.scaling.loss_scale import LossScaler

__all__ = ["AgreedVerdict", "Verdict", "newly_found", "read_verdicts", "settle_on_device", "settle_verdicts"]


class _Telling:
    """Whether the scaler has heard of a block."""

    done = False


class Verdict:
    """What one scaled block found in the gradients, read or still on the device.

    Optimizers that share a block share its verdict, or have one each: the scaler hears of the block once.

    Args:
        scaler: The scaler of the block.
        scale: The scale of the block.
        found: What `autoamp.scaling.unscale_` returned, and other tensors like these.
        block: An earlier verdict of the same block, if there is one.

    Attributes:
        scaler: As given.
        scale: As given.
        found: As given, empty once it was read.
        overflowed: Whether an inf or nan was there; None as long as nobody has read it.
        counted: Whether a verdict of this block was settled.
        cleared: Where 0 took the place of gradients that overflowed: the tensors that they were of.
        is_whole: Whether nothing more is going to be found. Then a step may leave it unread.
    """

    is_whole = True

    _telling: _Telling

    __slots__ = ("_telling", "cleared", "found", "overflowed", "scale", "scaler")

    def __init__(self, scaler: LossScaler, scale: Scale, found: Sequence[Tensor], block: Verdict | None = None) -> None:
        self.scaler = scaler
        self.scale = scale
        self.found = found
        self.overflowed: bool | None = None
        self.cleared: Sequence[Tensor] = ()
        self._telling: _Telling = _Telling() if block is None else block._telling

    @property
    def counted(self) -> bool:
        """Whether a verdict of this block was settled."""
        return self._telling.done

    @counted.setter
    def counted(self, counted: bool) -> None:
        self._telling.done = counted


class AgreedVerdict(Verdict):
    """What all ranks found for a verdict of this rank, which is told once that is read.

    Args:
        of: This rank's own.
        found: What all ranks found.

    Attributes:
        of: As given.
    """

    __slots__ = ("is_whole", "of")

    is_whole: bool

    def __init__(self, of: Verdict, found: Tensor) -> None:
        self.of = of
        super().__init__(of.scaler, of.scale, (found,), block=of)
        self.is_whole = of.is_whole
        self.cleared = of.cleared if of.overflowed else ()

    def settled(self) -> None:
        """Let this rank's own verdict say the same, now that it is read."""
        self.of.overflowed = self.overflowed
        if isinstance(self.of, AgreedVerdict):
            self.of.settled()


@torch.no_grad()
def newly_found(found: Sequence[Tensor], earlier: Sequence[Verdict]) -> list[Tensor]:
    """Return what was found in some gradients, without the inf and nan that earlier blocks left in them.

    Args:
        found: What `autoamp.scaling.unscale_` returned.
        earlier: The verdicts of earlier blocks on these gradients, read or not.

    Returns:
        Tensors like ``found``, 0 where an earlier verdict says that an inf or nan was there. Nothing is read.
    """
    if any(verdict.overflowed for verdict in earlier):
        return []
    flags = [flag for verdict in earlier for flag in verdict.found]
    new = []
    for one in found:
        for flag in flags:
            if flag.device == one.device:
                one = one * (flag == 0)
        new.append(one)
    return new


def settle_verdicts(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Read the verdicts of one step, with one device synchronisation, and tell every scaler among them once.

    The first that overflowed is to blame, and its scaler goes lower. Those before it were clean. Those after it say
    nothing, as an inf stays in a gradient that is accumulated, so they are not counted.

    Args:
        verdicts: In the order of the blocks. Those that were settled for another optimizer are not counted again.

    Returns:
        The verdict to blame, None if no gradient overflowed.
    """
    read_verdicts(verdicts)
    # In loops: this is a part of every step, and each comprehension is a call.
    blamed: Verdict | None = None
    clean: list[Verdict] = []
    told: set[int] = set()
    for verdict in verdicts:
        if verdict.overflowed:
            blamed = verdict
            break
        clean.append(verdict)
        if verdict._telling.done:
            told.add(id(verdict.scaler))
    if blamed is not None:
        told.add(id(blamed.scaler))
        if not blamed._telling.done:
            blamed.scaler.update(True)
    for verdict in clean:
        if id(verdict.scaler) not in told:
            told.add(id(verdict.scaler))
            verdict.scaler.update(False)
    for verdict in verdicts:
        verdict._telling.done = True
    return blamed


def settle_on_device(verdicts: Sequence[Verdict], tell: Callable[[bool], None]) -> torch.Tensor | None:
    """Settle the verdicts of one step without reading them: the scaler moves on by a flag that stays on the device.

    Args:
        verdicts: As for `settle_verdicts`.
        tell: Called with whether they overflowed, once that is known; it raises nothing.

    Returns:
        The flag, fp32 without dimensions, not 0 where any gradient overflowed. None where verdicts must be read, and
        nothing was done: some are read already, several scalers have a part in it, or the scaler lives on the host.
    """
    if not verdicts or any(verdict.overflowed is not None or not verdict.is_whole for verdict in verdicts):
        return None
    scaler, counted = verdicts[0].scaler, verdicts[0].counted
    if any(verdict.scaler is not scaler or verdict.counted is not counted for verdict in verdicts):
        return None
    found = [flag for verdict in verdicts for flag in verdict.found]
    if not found or not all(scaler.serves_device(flag.device) for flag in found):
        return None
    device = found[0].device
    flags = [flag.to(device, non_blocking=True).view(()) for flag in found]
    flag = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
    if counted:
        scaler.late.add(flag, tell)
    else:
        scaler.update_later(flag, tell)
    for verdict in verdicts:
        verdict.counted = True
    return flag


def read_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Read those verdicts that nobody has read, with one synchronisation of each device, and tell no scaler."""
    unread: list[tuple[Verdict, int]] = []
    flags: list[Tensor] = []
    for verdict in verdicts:
        if verdict.overflowed is None:
            unread.append((verdict, len(verdict.found)))
            flags += verdict.found
    if not unread:
        return
    late, place = unread[0][0].scaler.late, 0
    # What a scaler has not heard of yet is on the same device, as a rule, and comes by the same wait.
    values = late.read(flags) if late and all(late.serves(flag.device) for flag in flags) else found_any(flags)
    for verdict, count in unread:
        verdict.overflowed = any(values[place : place + count])
        verdict.found = ()
        place += count
        if isinstance(verdict, AgreedVerdict):
            verdict.settled()
