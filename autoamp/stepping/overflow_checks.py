"""What blocks and backward passes found in the gradients, how the loss scalers hear of it, and what was checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from autoamp.scaling import LossScaler, Scale, found_any, is_sharded
from autoamp.tensors import version_of


class _Reported:
    """The result of a block or pass that its scaler has heard: None for none yet, else whether gradients overflowed."""

    told: bool | None = None


class OverflowCheck:
    """What one scaled block or backward pass found in the gradients, read or still on the device.

    Optimizers that share a block share its check: the scaler hears of the block once.

    Args:
        scaler: The scaler of the block.
        scale: The scale of the block.
        found: What `autoamp.scaling.unscale_` returned, and other tensors like these.
        earlier: An earlier check of the same block or pass, if there is one: the scaler hears of it once.

    Attributes:
        scaler: As given.
        scale: As given.
        reported: The result that the scaler has heard.
        overflowed: Whether an inf or nan was there; None as long as nobody has read it.
        is_complete: Whether nothing more is going to be found. Then a step may leave it unread.
    """

    is_complete = True

    def __init__(
        self, scaler: LossScaler, scale: Scale, found: Sequence[Tensor], earlier: OverflowCheck | None = None
    ) -> None:
        self.scaler = scaler
        self.scale = scale
        self.reported: _Reported = _Reported() if earlier is None else earlier.reported
        self.overflowed: bool | None = None
        self._found = found

    @property
    def found(self) -> Sequence[Tensor]:
        """The flags that are to be read; none once they were."""
        return self._found if self.overflowed is None else ()

    @property
    def flags(self) -> Sequence[Tensor]:
        """What was found, as flags, also after they were read."""
        return self.found if self.overflowed is None else (torch.full((1,), float(self.overflowed)),)

    @property
    def cleared(self) -> Sequence[Tensor]:
        """The tensors whose gradients overflowed, if 0 took their place."""
        return ()

    def agree(self, found: Tensor) -> None:
        """Go by what all ranks found from now on."""
        self._found = (found,)


def read_checks(checks: Sequence[OverflowCheck]) -> None:
    """Read those checks that nobody has read, with one synchronization of each device, and tell no scaler."""
    # Once each: several optimizers may have a check in common.
    unread = {id(check): (check, check.found) for check in checks if check.overflowed is None}.values()
    values = found_any([flag for _, flags in unread for flag in flags])
    for check, flags in unread:
        check.overflowed = any(values[: len(flags)])
        values = values[len(flags) :]


def resolve(checks: Sequence[OverflowCheck]) -> OverflowCheck | None:
    """Read the checks of one step, tell every scaler among them once, and return the check to blame, if any.

    The first that overflowed is to blame, and its scaler goes lower. Those before it were clean. Those after it say
    nothing, as an inf stays in a gradient that is accumulated.
    """
    read_checks(checks)
    blamed = next((check for check in checks if check.overflowed), None)
    clean = list(checks if blamed is None else checks[: checks.index(blamed)])
    # Once: another optimizer of the block may have told the scaler, or of a later check of these gradients.
    if blamed is not None and not any(one.reported.told for one in checks if one.scaler is blamed.scaler):
        blamed.scaler.update(True)
    for scaler in dict.fromkeys(check.scaler for check in clean):
        heard = any(check.reported.told is not None for check in clean if check.scaler is scaler)
        if not heard and (blamed is None or scaler is not blamed.scaler):
            scaler.update(False)
    for check in checks:
        if check in clean or check.overflowed:
            check.reported.told = bool(check.reported.told) or check not in clean
    return blamed


def resolve_on_device(checks: Sequence[OverflowCheck], tell: Callable[[bool], None]) -> Tensor | None:
    """Settle the checks of one step without reading them: the scaler moves on by a flag that stays on the device.

    Args:
        checks: In the order of the blocks, at least one.
        tell: Called with whether they overflowed, once that is known; it raises nothing.

    Returns:
        The flag, fp32 without dimensions, not 0 where any gradient overflowed. None where checks must be read, and
        nothing was done: some are read already, several scalers have a part in it, or the scaler lives on the host.
    """
    first = checks[0]
    scaler, is_reported = first.scaler, first.reported.told is not None
    for check in checks:
        is_like_first = check.scaler is scaler and (check.reported.told is not None) is is_reported
        if check.overflowed is not None or not check.is_complete or not is_like_first:
            return None
    found = [flag for check in checks for flag in check.found]
    if not found or not all(scaler.serves_device(flag.device) for flag in found):
        return None
    flags = [flag.to(found[0].device, non_blocking=True).view(()) for flag in found]
    flag = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
    (scaler.unread.add if is_reported else scaler.update_later)(flag, tell)
    for check in checks:
        # The device tells the scaler itself: another optimizer of the block has nothing to add.
        check.reported.told = True
    return flag


# -- which gradients were checked --

Mark = tuple[TensorWeakRef, int | None]


def mark_of(gradient: Tensor) -> Mark:
    """Return what tells this gradient, with these values, from any other: the object and its version.

    Writes that torch does not count go unseen: through ``.data``, through numpy, and in-place collectives. Of a DTensor
    the version is None, since it does not count multi-tensor functions either. The object is referred to weakly, since
    an id is used again.
    """
    return TensorWeakRef(gradient), None if is_sharded(gradient) else version_of(gradient)


def is_same_gradient(mark: Mark | None, gradient: Tensor) -> bool:
    """Whether a gradient is the one of the mark, and was not written to since."""
    return mark is not None and mark[0]() is gradient and mark[1] is not None and mark[1] == version_of(gradient)


class CheckedGrads:
    """The gradients of one optimizer that were checked, as they were then."""

    def __init__(self) -> None:
        self._marks: dict[int, Mark] = {}

    def note(self, params: Iterable[Tensor]) -> None:
        """Take note that the gradients of these parameters were checked as they are now."""
        self._marks.update((id(param), mark_of(param.grad)) for param in params if param.grad is not None)

    def unchecked(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradients were not checked, or were written to or replaced since."""
        get = self._marks.get
        return [p for p in params if p.grad is not None and not is_same_gradient(get(id(p)), p.grad)]
