"""Steps that no loss scale of autoamp guards: by the program's own `torch.amp.GradScaler`, or without any loss scale.

The skips of a `GradScaler` are counted and explained, and its numbers stay untouched. Without a loss scale inf or nan
in the gradients is seen before the optimizer writes it into weights.

bf16 and fp32 have no loss scale, and neither has fp16 at a scale of 1. If the step is to be skipped or to raise, all
gradients are looked at, and the host waits for the device. For a warning the loss is enough: gradients that are not
finite make the next loss so. On a CPU the gradients of the first vectors, such as biases, tell of most backward passes
in the same step: these reach them last, and inf and nan go with them. On other devices a flag is read once it has
arrived.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.core.attach import living_optimizers_and_modules, named_params, stepped_params
from autoamp.core.block import open_blocks
from autoamp.core.gradients import (
    has_values,
    is_flat,
    is_sharded,
    local_of,
    non_finite,
    several_processes,
    total_norm,
)
from autoamp.core.guard import StepGuard, read_checks
from autoamp.core.listeners import Cause
from autoamp.core.loss_scale import StaticLossScaler, UnreadFlags
from autoamp.core.optimizers import Guards
from autoamp.core.steps import Step, StepHistory
from autoamp.errors import NonFiniteGradientsError, UsageError, warn_user
from autoamp.tensors import is_capturing, without_grad

_VECTORS = 4
_KIND = operator.attrgetter("__class__", "dtype", "layout", "is_cpu", "requires_grad")
_PLAIN = {(Tensor, torch.float32, torch.strided, True, False)}
# A scale that was backed off to 0 is told as this.
_LOWEST = 2.0**-126


class NonFiniteSteps:
    """Looks at each step that no loss scale of autoamp checks, while the handle is active.

    Args:
        optimizers: Those of the handle, with their guards; they count the skips.
        action: What to do with a step whose gradients or loss hold inf or nan: ``"warn"``, ``"raise"`` or ``"skip"``.
    """

    keeps = 1000

    def __init__(self, optimizers: Guards, action: str) -> None:
        self._optimizers = optimizers
        self._action = action
        self._sentences: list[str] = []
        self._total = self._in_a_row = 0
        self._told: set[Any] = set()
        self._unread = UnreadFlags()
        # Whether a `GradScaler` of the program steps an optimizer now, and whether it has called that. The flag is
        # there if the optimizer itself skips, as fused ones do.
        self._scaler_steps = self._called = False
        self._flag: Tensor | None = None
        self._histories: weakref.WeakKeyDictionary[Any, StepHistory] = weakref.WeakKeyDictionary()

    def catch_up(self) -> None:
        """Learn what became of the last steps where only the device knows it; waits for the device."""
        self._unread.catch_up()

    @property
    def total(self) -> int:
        """How many steps had gradients or a loss with inf or nan. Waits as `catch_up` does."""
        self.catch_up()
        return self._total

    @property
    def sentences(self) -> Sequence[str]:
        """What is known of the first of these steps. Waits as `catch_up` does."""
        self.catch_up()
        return tuple(self._sentences)

    # -- under a `GradScaler` of the program --

    def loss_scaled(self, scaler: torch.amp.GradScaler, outputs: Any) -> None:
        """Take note of a loss that is scaled.

        Args:
            scaler: The scaler.
            outputs: The loss, or several.

        Raises:
            UsageError: A ``scale_loss`` block has scaled this loss already.
        """
        if open_blocks.count and scaler.is_enabled() and any(one.checks for one in self._optimizers.scalers):
            raise UsageError(
                "GradScaler.scale() inside a scale_loss block would scale the loss twice; call scaled_loss.backward() "
                "in the block, or scale by the GradScaler alone, outside of any block"
            )
        if isinstance(outputs, Tensor) and scaler.is_enabled() and not torch.compiler.is_dynamo_compiling():
            self._optimizers.steps.note(outputs, _LazyScale(scaler), waits=True)

    def around_unscale(self, original: Any) -> Any:
        """Return an ``unscale_`` whose errors are explained."""

        def unscale_(self_: Any, optimizer: Any) -> None:
            try:
                original(self_, optimizer)
            except Exception as error:
                self._optimizers.casts.explain(error)
                raise

        return unscale_

    def around_scaler_step(self, original: Any) -> Any:
        """Return a ``step`` that is counted."""

        def step(self_: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._scaler_steps or not self_.is_enabled() or torch.compiler.is_dynamo_compiling():
                return original(self_, optimizer, *args, **kwargs)
            self._optimizers.steps.own_scale = _LazyScale(self_)
            self._scaler_steps, self._called, self._flag = True, False, None
            try:
                result = original(self_, optimizer, *args, **kwargs)
            finally:
                self._scaler_steps = False
            self._count(self_, optimizer)
            return result

        return step

    def _count(self, scaler: Any, optimizer: Any) -> None:
        """Count the step that the scaler has just taken or skipped."""
        guard, flag = self._optimizers.guard_of(optimizer), self._flag
        if guard is None and optimizer not in self._histories:
            self._histories[optimizer] = StepHistory(type(optimizer).__name__, lambda: self._optimizers)
        history = self._histories[optimizer] if guard is None else guard.history
        if not self._called:
            # The scaler skipped the step without a call of the optimizer.
            self._optimizers.steps.begin(history.begin())
        elif guard is None:
            history.step = self._optimizers.steps.last
        if flag is not None and self._unread.serves(flag.device):
            self._unread.add(
                flag, functools.partial(_tell_late, history, history.step, weakref.ref(scaler)), urgent=True
            )
        elif not self._called or (flag is not None and bool(flag)):
            scale = scaler.get_scale()
            after = StaticLossScaler(max(scale * scaler.get_backoff_factor(), _LOWEST))
            history.end(history.step, after, scale)
        elif guard is None and not history.step.skipped:
            history.end(history.step)
        if not self._called:
            self._optimizers.steps.end(history.step)

    # -- without a loss scale --

    def refuses_step(self, optimizer: Any, guard: StepGuard | None) -> bool:
        """Look at the gradients or losses that an optimizer is about to step by; tell whether to skip the step.

        NonFiniteGradientsError: they hold inf or nan, and `action` is ``"raise"``.
        """
        step, waits, grads = self._optimizers.steps, self._action != "warn", []
        flag = getattr(optimizer, "found_inf", None)
        self._called, self._flag = True, flag if isinstance(flag, Tensor) else None
        self._optimizers.steps.last.flag = self._flag
        if flag is not None or is_capturing():
            return False
        # A loss is of one rank. Unless that rank only warns, all ranks are to do the same.
        sees_losses = not (waits and several_processes())
        if self._scaler_steps or (guard is not None and guard.grads.resolved):
            # A scaler has found the gradients to be finite. Losses on a GPU are only looked at where somebody asked.
            asked = waits or step.reads_flags or self._scaler_steps
            losses = [loss for loss in step.losses if sees_losses and (asked or loss.is_cpu)]
        else:
            params, losses = stepped_params(optimizer), step.unscaled if sees_losses else []
            waits = waits or step.reads_flags
            if self._action == "skip" and several_processes():
                if any(is_sharded(param) or is_flat(param) for param in params):
                    raise UsageError(
                        "on_nonfinite='skip' looks at the shards of this rank alone, and others would take the step; "
                        "choose on_nonfinite='raise'"
                    )
                requested = self._optimizers.requested_group(optimizer)
                if requested is not None and requested.replicas < requested.group.size():
                    raise UsageError(
                        "on_nonfinite='skip' looks at the gradients of this rank alone, and others of sync_over() "
                        "would take the step; choose on_nonfinite='raise', or loss_scale='dynamic', by which all skip"
                    )
            if losses and not waits:
                vectors = (one for one in params if one.grad is not None and one.dim() < 2 and one.is_cpu)
                params = list(itertools.islice(vectors, _VECTORS))
            grads = [param.grad for param in params if param.grad is not None]
        if not grads and not losses:
            return False
        if {*map(_KIND, grads), *map(_KIND, losses)} == _PLAIN:
            # Read at once: nothing runs ahead of the host. A loss has one element. Large finite values make a norm inf.
            norms = torch._foreach_norm(grads) if grads else []
            if all(map(math.isfinite, (*losses, *norms))):
                self._in_a_row = 0
                return False
        # A program may have asked for shapes alone.
        grads, losses = list(filter(has_values, grads)), list(filter(has_values, losses))
        if not grads and not losses:
            return False
        # The handle may have other casts by the time of a step.
        without_casts = self._optimizers.casts.thread.with_mode(self._look, False)
        return without_casts(optimizer, guard, grads, losses, waits)  # type: ignore[no-any-return]

    def _look(
        self, optimizer: Any, guard: StepGuard | None, grads: Sequence[Tensor], losses: Sequence[Tensor], waits: bool
    ) -> bool:
        is_late = not waits and self._unread.serves((*grads, *losses)[0].device)
        # The program may have dropped the gradients of any loss but the last: such a pass is none of this step.
        flag = _holds_non_finite(grads, losses[-1:] if is_late else losses)
        # A guarded step was counted as it began.
        number = self._optimizers.steps.all - (guard is not None)
        if is_late:
            self._unread.add(flag, functools.partial(self._known, number, weakref.ref(optimizer)), urgent=True)
            return False
        names: Sequence[str] = ()
        if is_bad := bool(flag):
            unchecked = [] if self._scaler_steps else named_params(optimizer)
            names = non_finite((name, param.grad) for name, param in unchecked if param.grad is not None)
            # The sum of large finite squares is inf as well.
            is_bad = bool(
                names or (non_finite(("", loss) for loss in losses[-1:]) and not self._is_of_another(optimizer))
            )
        if not is_bad:
            self._in_a_row = 0
            return False
        return self._act(number, optimizer, names)

    def _is_of_another(self, optimizer: Any) -> bool:
        """Whether a loss of inf or nan that left this optimizer's gradients finite made those of another one so."""
        guards = [guard for guard in self._optimizers.guards if guard.optimizer is not optimizer]
        for guard in guards:
            # Automatic scaling may have put 0 in their place.
            read_checks(guard.grads.checks)
        if any(check.overflowed for guard in guards for check in guard.grads.checks):
            return True
        others = [one for one in living_optimizers_and_modules()[0] if one is not optimizer]
        own = set(map(id, stepped_params(optimizer)))
        params = [param for one in others for param in stepped_params(one) if id(param) not in own]
        return bool(non_finite(("", param.grad) for param in params if param.grad is not None))

    def _act(self, number: int, optimizer: Any, names: Sequence[str]) -> bool:
        """Explain a step, and do with it as `action` says; tell whether to skip it."""
        self._in_a_row += 1
        skips, overflow = self._action == "skip", None
        # In a row of steps that are taken the weights are not finite any more.
        if self._in_a_row == 1 or skips:
            overflow = self._cause(number, late=False)
        told = self._note(number, optimizer, names, overflow)
        if self._action == "raise":
            raise NonFiniteGradientsError(told, overflow)
        if skips:
            for param in stepped_params(optimizer):
                param.grad = None
            self._optimizers.steps.skips.add()
            if self._in_a_row >= self._optimizers.max_consecutive_skips:
                raise NonFiniteGradientsError(
                    f"{self._in_a_row} steps in a row were skipped for inf or nan in the gradients, as "
                    f"max_consecutive_skips says: {told}",
                    overflow,
                )
        return skips

    def _cause(self, number: int, *, late: bool) -> Cause | None:
        """Return what made the inf or nan, if a listener knows."""
        found = (hear(number, late=late) for hear in self._optimizers.listeners.step_nonfinite)
        return next((one for one in found if one is not None), None)

    def _known(self, number: int, reference: weakref.ref[Any], not_finite: bool) -> None:
        """Called after a step that was taken."""
        optimizer = reference()
        if not not_finite or optimizer is None:
            return
        # Looked for in the weights, as the gradients are those of a later step; once, as that waits for the device.
        names = [] if self._sentences else non_finite(named_params(optimizer))
        overflow = None if self._sentences else self._cause(number, late=True)
        self._note(number, optimizer, names, overflow)

    def _note(self, number: int, optimizer: Any, names: Sequence[str], overflow: Cause | None) -> str:
        """Count a step, warn of the first for each cause, and return what it is and what to do.

        Args:
            number: How many steps of optimizers came before it.
            optimizer: The optimizer.
            names: The first parameters whose gradients are not finite, or whose weights are after the step; none where
                only the loss is not.
            overflow: What made the inf or nan, where that was looked for.
        """
        where = f"the gradients of {', '.join(names)}" if names else "the loss"
        done = ", and is skipped" if self._action == "skip" else ""
        cause = "" if overflow is None else f": {overflow.cause}"
        sentence = f"step {number} of {type(optimizer).__name__} has inf or nan in {where}{done}{cause}"
        self._total += 1
        if len(self._sentences) < self.keeps:
            self._sentences.append(sentence)
        advice = "check the batch and what computes it, the loss and the learning rate"
        if overflow is None:
            advice += (
                ". The op that made it is not known, because this step was not recorded: init(trace_overflow=True), or "
                "autoamp run --trace-overflow, names it in the next run"
            )
        elif overflow.suggestion is not None:
            advice = overflow.suggestion
        if self._action == "warn":
            advice += "; on_nonfinite='skip' skips such steps, 'raise' stops before them"
        told = f"{sentence}; {advice}"
        place = None if overflow is None else overflow.place
        if self._action != "raise" and place not in self._told:
            self._told |= {None, place}
            warn_user(f"{told}. Others are counted")
        return told


@without_grad
def _holds_non_finite(grads: Sequence[Tensor], losses: Sequence[Tensor]) -> Tensor:
    """Return whether any of these hold inf or nan, as a flag of one element on a device.

    On a CPU it may be set for finite values above 1e19 too: a largest value takes 30 times as long as a 2-norm.
    """
    local = [local_of(tensor) for tensor in (*grads, *losses)]
    if not grads:
        # 0, or nan where a loss is inf or nan. On a GPU a norm takes more kernels, and copies.
        return functools.reduce(torch.add, ((loss - loss).to(local[0].device) for loss in local))
    norm_type = 2.0 if all(tensor.is_cpu for tensor in local) else torch.inf
    return total_norm(local, norm_type).isfinite().logical_not()


class _LazyScale:
    """The scale of a `GradScaler`, which is read when it is needed: reading it may wait for the device."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def __float__(self) -> float:
        return float(self._scaler.get_scale())


def _tell_late(history: StepHistory, step: Step, reference: weakref.ref[Any], skipped: bool) -> None:
    """Count a step that was taken earlier. By now the scaler has been updated once for it."""
    scaler = reference()
    scale = scaler.get_scale() if skipped and scaler is not None else 1.0
    backoff = 1.0 if scaler is None else scaler.get_backoff_factor()
    history.end(step, StaticLossScaler(max(scale, _LOWEST)) if skipped else None, scale / backoff, late=True)
