"""Steps that no loss scale guards: inf or nan in the gradients is seen before the optimizer writes it into weights.

bf16 and fp32 have no loss scale, and neither has fp16 at a scale of 1. If the step is to be skipped or to raise, all
gradients are looked at, and the host waits for the device. For a warning the loss is enough: gradients that are not
finite make the next loss so. On a CPU the gradients of the first vectors, such as biases, tell of most backward passes
in the same step: these reach them last, and inf and nan go with them. On other devices a flag is read once it has
arrived.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.diagnostics.grad_scaler_watch import GradScalerWatch
from autoamp.diagnostics.overflow import OverflowTrace
from autoamp.diagnostics.verdicts import Overflow
from autoamp.errors import NonFiniteGradientsError, UsageError, warn_user
from autoamp.program import Subscriber
from autoamp.scaling import UnreadFlags, is_flat, is_sharded, local_of, non_finite, total_norm
from autoamp.stepping import GuardedOptimizers, StepGuard, named_params, several_processes, stepped_params

_VECTORS = 4


class NonFiniteSteps(Subscriber):
    """Looks at the gradients of each step that no loss scale checks, while the handle is active.

    Args:
        optimizers: Those of the handle, with their guards.
        overflows: Explains such steps.
        action: What to do with such a step: ``"warn"``, ``"raise"`` or ``"skip"``.

    Attributes:
        grad_scaler_watch: Counts the skips of the program's own `GradScaler`.
    """

    keeps = 1000

    def __init__(self, optimizers: GuardedOptimizers, overflows: OverflowTrace, action: str) -> None:
        self._overflows = overflows
        self._action = action
        self.grad_scaler_watch = GradScalerWatch(optimizers)
        self._optimizers = optimizers
        self._sentences: list[str] = []
        self._total = self._in_a_row = 0
        self._told: set[Any] = set()
        self._unread = UnreadFlags()

    def started(self) -> None:
        """Look at each step from now on."""
        self._optimizers.undoes_steps = self._action != "warn"

    def stopped(self) -> None:
        """Wait for the flags that were not read."""
        self._optimizers.undoes_steps = False
        self._unread.catch_up()
        self.grad_scaler_watch.catch_up()

    @property
    def total(self) -> int:
        """How many steps had gradients or a loss with inf or nan. Waits as `sentences` does."""
        self._unread.catch_up()
        return self._total

    @property
    def sentences(self) -> Sequence[str]:
        """What is known of the first of these steps. Waits for the device where that alone knows of the last ones."""
        self._unread.catch_up()
        return tuple(self._sentences)

    # -- a step --

    def refuses_step(self, optimizer: Any, guard: StepGuard | None) -> bool:
        """Look at a step with casts off; see `_look`."""
        # The handle may have other casts by the time of a step.
        return self._optimizers.casts.local.with_mode(self._look, False)(optimizer, guard)  # type: ignore[no-any-return]

    def _look(self, optimizer: Any, guard: StepGuard | None) -> bool:
        """Look at the gradients or losses that an optimizer is about to step by; tell whether to skip the step.

        NonFiniteGradientsError: they hold inf or nan, and `action` is ``"raise"``.
        """
        self.grad_scaler_watch.optimizer_called(optimizer)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return False
        if getattr(optimizer, "found_inf", None) is not None:
            return False
        step, waits, grads = self._overflows.recorder.step, self._action != "warn", []
        # A loss is of one rank. Unless that rank only warns, all ranks are to do the same.
        sees_losses = not (waits and several_processes())
        if self.grad_scaler_watch.stepping or (guard is not None and guard.pending.resolved):
            # A scaler has found the gradients to be finite. Losses on a GPU are only looked at where somebody asked.
            asked = waits or self._overflows.always or self.grad_scaler_watch.stepping
            losses = [loss for loss in step.losses if loss.numel() == 1 and sees_losses and (asked or loss.is_cpu)]
        else:
            params, losses = stepped_params(optimizer), step.unscaled if sees_losses else []
            waits = waits or self._overflows.wants_flags()
            if self._action == "skip" and several_processes() and any(is_sharded(p) or is_flat(p) for p in params):
                raise UsageError(
                    "on_nonfinite='skip' looks at the shards of this rank alone, and others would take the step; "
                    "choose on_nonfinite='raise'"
                )
            if losses and not waits:
                vectors = (param for param in params if param.dim() < 2 and param.is_cpu)
                params = list(itertools.islice(vectors, _VECTORS))
            grads = [param.grad for param in params if param.grad is not None]
        flag = _holds_non_finite(grads, losses)
        if flag is None:
            return False
        # A guarded step was counted as it began.
        number = self._optimizers.step_stats.all - (guard is not None)
        if not waits and self._unread.serves(flag.device):
            self._unread.add(flag, functools.partial(self._known, number, weakref.ref(optimizer)), urgent=True)
            return False
        unchecked = [] if self.grad_scaler_watch.stepping else named_params(optimizer)
        named = ((name, param.grad) for name, param in unchecked if param.grad is not None)
        # The sum of large finite squares is inf as well.
        if not bool(flag) or not ((names := non_finite(named)) or non_finite(("", loss) for loss in losses)):
            self._in_a_row = 0
            return False
        return self._act(number, optimizer, names)

    def _act(self, number: int, optimizer: Any, names: Sequence[str]) -> bool:
        """Explain a step, and do with it as `action` says; tell whether to skip it."""
        self._in_a_row += 1
        skips, overflow = self._action == "skip", None
        # In a row of steps that are taken the weights are not finite any more.
        if self._in_a_row == 1 or skips:
            overflow = self._overflows.step_not_finite()
        told = self._note(number, optimizer, names, overflow)
        if self._action == "raise":
            raise NonFiniteGradientsError(told, overflow)
        if skips:
            for param in stepped_params(optimizer):
                param.grad = None
            self._optimizers.step_stats.add_skip()
            if self._in_a_row >= self._optimizers.max_consecutive_skips:
                raise NonFiniteGradientsError(
                    f"{self._in_a_row} steps in a row were skipped for inf or nan in the gradients, as "
                    f"max_consecutive_skips says: {told}",
                    overflow,
                )
        return skips

    def _known(self, number: int, reference: weakref.ref[Any], not_finite: bool) -> None:
        """Called after a step that was taken."""
        optimizer = reference()
        if not not_finite or optimizer is None:
            return
        # Looked for in the weights, as the gradients are those of a later step; once, as that waits for the device.
        names = [] if self._sentences else non_finite(named_params(optimizer))
        overflow = None if self._sentences else self._overflows.step_not_finite(late=True)
        self._note(number, optimizer, names, overflow)

    def _note(self, number: int, optimizer: Any, names: Sequence[str], overflow: Overflow | None) -> str:
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
        told = f"{sentence}; {self._remedy(overflow)}"
        place = None if overflow is None else overflow.place
        if self._action != "raise" and place not in self._told:
            self._told |= {None, place}
            warn_user(f"{told}. Others are counted")
        return told

    def _remedy(self, overflow: Overflow | None) -> str:
        """Return what to do: about the cause where that is known, else how to get to know it."""
        advice = "look at the data, the loss and the learning rate"
        if overflow is None:
            advice += (
                ". The op that made it is not known, because this step was not watched: trace_overflow=True names it"
            )
        elif overflow.suggestion is not None:
            advice = overflow.suggestion
        if self._action == "warn":
            advice += "; on_nonfinite='skip' skips such steps, 'raise' stops before them"
        return advice


def _holds_non_finite(grads: Sequence[Tensor], losses: Sequence[Tensor]) -> Tensor | None:
    """Return a flag of one element that tells of inf or nan in any of these; None where there are none.

    On a CPU it may be set for finite values above 1e19 too: there a largest value takes 30 times as long as a 2-norm.
    """
    local = [local_of(tensor) for tensor in (*grads, *losses)]
    if not local:
        return None
    if not grads:
        # 0, or nan where a loss is inf or nan. On a GPU a norm takes more kernels, and copies.
        return functools.reduce(torch.add, ((loss - loss).to(local[0].device) for loss in local))
    norm_type = 2.0 if all(tensor.is_cpu for tensor in local) else torch.inf
    return total_norm(local, norm_type).isfinite().logical_not()
