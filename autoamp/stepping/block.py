"""The gradients of a `scale_loss` block: scaled on entry, unscaled and checked on exit.

`scaled_block` is the part of ``scale_loss`` that handles gradients. What it found in them goes to the guards of the
optimizers as a `Verdict`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from autoamp.errors import UsageError
from autoamp.patching import imitate
from autoamp.scaling import (
    LossScaler,
    Scale,
    Verdict,
    inverse_scale,
    newly_found,
    scale_,
    scale_ratio,
    unscale_,
)
from autoamp.stepping.checks import warn_without_gradients
from autoamp.stepping.guard import StepGuard

__all__ = ["open_blocks", "scaled_block", "watch_autograd_grad"]


class _OpenBlocks(threading.local):
    """The blocks of a thread in which the program scales its loss.

    Attributes:
        count: How many are open.
        differentiated: How often the program asked within one for gradients that go to no ``.grad``.
    """

    count = 0
    differentiated = 0


open_blocks = _OpenBlocks()


class scaled_block:  # noqa: N801, named as what it is in a with statement
    """A block in which the gradients of some optimizers are those of a scaled loss.

    Inside, everything in ``.grad`` has the scale of the block: gradients of earlier blocks are multiplied by it first.
    After it they have true values again, also after an exception. A scaler that does not check (scale 1.0) costs no
    pass over the gradients.

    Args:
        guards: Of the optimizers whose gradients the loss makes; none where only the gradients of inputs are wanted.
        scaler: Gives the scale, and is told later what became of it.
        delay_unscale: Leave the gradients scaled, for a later block or the step to unscale and check.

    Yields:
        The scale: multiply the loss by it.

    Raises:
        UsageError: One of the optimizers is in a block already.
    """

    __slots__ = ("_delay_unscale", "_differentiated", "_guards", "_scale", "_scaler")

    def __init__(self, guards: Iterable[StepGuard], scaler: LossScaler, *, delay_unscale: bool = False) -> None:
        self._guards = tuple(dict.fromkeys(guards))
        self._scaler = scaler
        self._delay_unscale = delay_unscale
        self._scale: Scale = 1.0
        self._differentiated = 0

    def __enter__(self) -> Scale:
        self._scale = _open(self._guards, self._scaler)
        open_blocks.count += 1
        self._differentiated = open_blocks.differentiated
        return self._scale

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guards, scaler = self._guards, self._scaler
        try:
            alone = kind is None and not self._delay_unscale and len(guards) == 1
            if alone and guards[0].leave_plain_block(scaler, self._scale):
                return
            for guard in guards:
                guard.collect()
            if kind is not None:
                # The program may catch the exception and step all the same: not with inf and nan.
                _leave(guards, scaler, self._scale, self._scale != 1.0, warns=False)
            elif self._delay_unscale:
                for guard in guards:
                    guard.leave_block(self._scale, delayed=scaler if scaler.checks else None)
            else:
                warns = open_blocks.differentiated == self._differentiated
                _leave(guards, scaler, self._scale, scaler.checks, warns=warns)
        finally:
            open_blocks.count -= 1
            for guard in guards:
                guard.in_block = False


def _open(guards: Sequence[StepGuard], scaler: LossScaler) -> Scale:
    """Bring the gradients that are there to the scale of the block, and return the scale."""
    for guard in guards:
        if guard.in_block:
            raise UsageError(f"{guard.name} is in a scale_loss block already; end that block before the next")
    for guard in guards:
        guard.collect(new_pass=True)
        guard.take_in_joined()
        guard.forget_abandoned()
        if not scaler.checks:
            guard.finish_delayed()
    # Read after the loop, in which verdicts were settled: that may have changed it.
    scale = scaler.scale_at_hand()
    if any(guard.grads_scale != scale for guard in guards):
        _rescale(guards, scale)
    for guard in guards:
        guard.before_backward()
    for guard in guards:
        guard.enter_block(scale)
    return scale


def _rescale(guards: Sequence[StepGuard], scale: Scale) -> None:
    """Multiply gradients that have another scale, those of a parameter of several optimizers once."""
    by_scale: dict[Scale, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for guard in guards:
        params = [param for param in guard.params() if param.grad is not None and id(param) not in seen]
        if params:
            seen.update(map(id, params))
            by_scale.setdefault(guard.grads_scale, []).extend(params)
    for before, params in by_scale.items():
        if before != scale:
            scale_(params, scale_ratio(scale, before))


def _leave(guards: Sequence[StepGuard], scaler: LossScaler, scale: Scale, checks: bool, *, warns: bool) -> None:
    """Unscale and check, and leave the verdict with every optimizer that has gradients."""
    lists = [guard.params() for guard in guards]
    present = [guard.has_gradients(params) for guard, params in zip(guards, lists, strict=True)]
    verdicts: Sequence[Verdict | None] = [None] * len(lists)
    if checks and any(present):
        verdicts = _judged(guards, lists, scaler, scale)
    for guard, params, has_gradients, verdict in zip(guards, lists, present, verdicts, strict=True):
        if not has_gradients:
            guard.check_shards()
            shared = guard.together is not None
            # Verdicts are shared one by one, so a rank without gradients has as many as the others.
            verdict = Verdict(scaler, scale, ()) if checks and shared else None
            if warns and not shared:
                warn_without_gradients(guard.name, params)
        guard.leave_block(1.0, verdict, params=params)
        if checks:
            guard.unscaled(params, scaler, scale)


def _judged(
    guards: Sequence[StepGuard], lists: Sequence[Sequence[torch.Tensor]], scaler: LossScaler, scale: Scale
) -> Sequence[Verdict]:
    """Unscale and check the gradients of all guards. Returns a verdict for each.

    An overflow in this block is the overflow of all. What an earlier block left is that of its own optimizers alone.
    """
    if len(guards) == 1:
        return [Verdict(scaler, scale, unscale_(lists[0], inverse_scale(scale), guards[0].usual, scaler.late.blank))]
    if not any(guard.pending for guard in guards):
        params = [*itertools.chain.from_iterable(lists)]
        verdict = Verdict(scaler, scale, unscale_(params, inverse_scale(scale), guards[0].usual, scaler.late.blank))
        return [verdict] * len(guards)
    known, new = {}, {}
    for owners, params in _by_owners(lists).items():
        known[owners] = unscale_(params, inverse_scale(scale), None, scaler.late.blank)
        new[owners] = newly_found(known[owners], [verdict for place in owners for verdict in guards[place].pending])
    verdicts: list[Verdict] = []
    for place in range(len(guards)):
        flags = [flag for owners in known for flag in (known if place in owners else new)[owners]]
        verdicts.append(Verdict(scaler, scale, flags, block=verdicts[0] if verdicts else None))
    return verdicts


def _by_owners(lists: Sequence[Sequence[torch.Tensor]]) -> dict[frozenset[int], list[torch.Tensor]]:
    """Sort parameters by the lists that they, or others with the same gradient, are in."""
    by_grad: dict[int, tuple[list[torch.Tensor], set[int]]] = {}
    for place, params in enumerate(lists):
        for param in params:
            if param.grad is not None:
                sharing, places = by_grad.setdefault(id(param.grad), ([], set()))
                sharing.append(param)
                places.add(place)
    owned: dict[frozenset[int], list[torch.Tensor]] = {}
    for sharing, places in by_grad.values():
        owned.setdefault(frozenset(places), []).extend(sharing)
    return owned


def watch_autograd_grad(original: Any) -> Any:
    """Return a replacement of `torch.autograd.grad` that counts its calls in blocks.

    A block in which the program asked for gradients in this way may leave nothing in ``.grad``, and nobody is warned.
    """

    def grad(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and open_blocks.count:
            open_blocks.differentiated += 1
        return original(*args, **kwargs)

    return imitate(grad, original, "torch.autograd", "grad")
