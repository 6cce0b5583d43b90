"""What ``optimizer.step()`` must do next: step, skip, or ask its closure again at a lower loss scale.

A `StepGuard` stands in front of one optimizer. Blocks of its losses leave verdicts with it, whose flags stay on the
device. ``optimizer.step()`` reads all verdicts since the last step at once, tells the loss scalers, and steps or skips.
An optimizer that takes the flag of an overflow on its device, as torch's fused ones do for `torch.amp.GradScaler`, gets
it there: nobody waits for the device at all, and the guard hears later whether that was a skip.

A block calls the guards of its optimizers; a guard knows nothing of blocks but what they tell it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoamp.casting import Casts
from autoamp.errors import NonFiniteGradientsError, UsageError
from autoamp.scaling import (
    AgreedVerdict,
    Agreements,
    AskedGroup,
    Ballot,
    GradientMark,
    Looked,
    LossScaler,
    Scale,
    ScaledMark,
    Together,
    UsualGradients,
    Verdict,
    clip_,
    has_shards,
    inverse_scale,
    is_sharded,
    local_of,
    non_finite,
    non_finite_now,
    number_of,
    powered_norm,
    read_verdicts,
    settle_on_device,
    settle_partial,
    settle_verdicts,
    total_norm,
    unscale_,
)
from autoamp.stepping.attach import AttachedStep, named_params, stepped_params
from autoamp.stepping.digest import found_on_ranks
from autoamp.stepping.masters import MasterWeights
from autoamp.stepping.reduced import Reduced
from autoamp.stepping.replicas import begin_compression_anew, may_compress, several_processes
from autoamp.stepping.sharded_modules import refuse_left_behind, warn_of_unscaled_shards
from autoamp.stepping.skips import Skips
from autoamp.stepping.usage_checks import RepeatedStep
from autoamp.tensors import version_of

__all__ = ["GivenUp", "StepGuard", "versions_of"]

# So many halvings lead from the highest default scale, 2**24, far below 1, where no scale is to blame any more.
_MAX_EVALUATIONS = 33

# At most so many verdicts wait for a step. Then they are read, and one that overflowed is left.
_MANY_VERDICTS = 64


class StepGuard:
    """Stands in front of one optimizer's ``step`` from `install` to `uninstall`.

    The optimizer is anything with ``param_groups`` and ``step``. It refers to the guard, and the guard refers to it
    weakly. A deep copy of the optimizer, or an unpickled one, is not guarded.

    Args:
        optimizer: What to guard.
        masters: The masters that it steps in place of half parameters. They take the gradients and what was written
            into half parameters before a step, and are copied into the half parameters after it.
        casts: Gives what casts for the program, if anything does. It is off while the optimizer steps, and on in a
            closure that is given to ``step``. Its cached casts are dropped once parameters may have changed.
        on_step: Called with this guard, and whether there are several processes, once for each step, before it is
            taken or skipped.
        on_skip: Called once for each skip, as soon as it is known.
        serves: Tells whether another guard sees to the gradient of a tensor.
        asked: Gives the process group over which the program wants steps to be agreed on, if it asked for one.
        scaler: Gives the scaler that hears of a step on a rank that has scaled no loss yet, if there is one.
        max_consecutive_skips: So many skips in a row are an error.
        wants_flags: Tells whether a flag is to be read that could stay on the device.
        on_stepped: Called with ``skips`` after each step or skip, once parameters are as it left them.

    Attributes:
        masters: As given.
        stepping: Whether the optimizer is stepping now, as this guard lets it.
        last_step_ran: Whether the optimizer was called by the last ``step()``: where it got the flag of an overflow on
            its device it changed nothing if that was set.
        skips: What is known of its steps and skips.
        max_consecutive_skips: As given.
        pending: The verdicts since the last step, in order.
        grads_scale: The scale of gradients now: 1.0 outside blocks but for ``delay_unscale``.
        in_block: Whether a block of this optimizer is open.
        scaled: Whether a block has had a loss of this optimizer.
        proven: Whether the scaled loss was run backward in one.
        step_closure: Steps with a closure in place of what this guard would do.
        usual: What gradients that are unscaled for this guard are like.
        reduced: Tells whether wrappers reduce all gradients; None as long as nobody has looked.
        together: The ranks that agree on each step; None where what this rank finds is what all find.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        masters: MasterWeights | None = None,
        casts: Callable[[], Casts | None] = lambda: None,
        on_step: Callable[[StepGuard, bool], None] = lambda *_: None,
        on_skip: Callable[[], None] = lambda: None,
        serves: Callable[[torch.Tensor], bool] = lambda _: False,
        asked: Callable[[], AskedGroup | None] = lambda: None,
        scaler: Callable[[], LossScaler | None] = lambda: None,
        max_consecutive_skips: int = 50,
        wants_flags: Callable[[], bool] = lambda: False,
        on_stepped: Callable[[Skips], None] = lambda _: None,
    ) -> None:
        self.name = type(optimizer).__name__
        self.stepping = False
        self._serves = serves
        self._wants_flags = wants_flags
        self._asked = asked
        self._scaler = scaler
        self._agreements = Agreements()
        # The scaler and scale of the last block or pass; and whether ranks agreed on all that was found since the step.
        self._last: tuple[LossScaler, Scale] | None = None
        self._agreed = False
        self._on_stepped = on_stepped
        # What the last block unscaled, and its scale.
        self._unscaled: tuple[Sequence[torch.Tensor], LossScaler, Scale] | None = None
        self.masters = masters
        self.last_step_ran = True
        self.skips = Skips(self.name, functools.partial(_skipped, on_skip))
        self._honours_flags = _honours_flags(type(optimizer))
        self.max_consecutive_skips = max_consecutive_skips
        self.pending: list[Verdict] = []
        self.grads_scale: Scale = 1.0
        self.in_block = False
        self.scaled = self.proven = False
        self._casts = casts
        self._on_step = on_step
        self.step_closure: Callable[..., Any] | None = None
        self._delayed: tuple[LossScaler, ScaledMark] | None = None
        self._abandoned: list[Verdict] = []
        self.usual = UsualGradients()
        self.reduced: Reduced | None = None
        self._usual_now = UsualGradients()
        self._mark = GradientMark(())
        # What the last step found, unless it was taken for certain: read, or a flag on the device.
        self._repeated = RepeatedStep()
        # The gradients that the last verdict looked at, where it looked at all of them as they were then.
        self._looked: Looked | None = None
        self._optimizer = weakref.ref(optimizer)
        self._attached: weakref.ref[AttachedStep] | None = None

    def install(self) -> None:
        """Put the guard in front of ``optimizer.step``.

        Raises:
            UsageError: This is no optimizer, or its step cannot be replaced.
        """
        # The optimizer refers to the attached step, and that to the guard: no cycle, and all go with the optimizer.
        self._attached = weakref.ref(AttachedStep(self._optimizer(), self.step))

    def uninstall(self) -> None:
        """Put back the step that was there; under a wrapper that somebody layered above, let all calls pass.

        Pending verdicts are dropped; gradients that ``delay_unscale`` left scaled get their true values.
        """
        attached = None if self._attached is None else self._attached()
        if attached is not None and self._optimizer() is not None:
            self.finish_delayed()
            self.pending = []
            attached.detach()

    def params(self) -> Sequence[torch.Tensor]:
        """Return the tensors whose gradients are scaled and unscaled: all that the optimizer steps."""
        return stepped_params(self._optimizer())

    def collect(self, *, new_pass: bool = False) -> None:
        """Let masters have the gradients that a backward pass left on half parameters; see `MasterWeights.collect`."""
        if self.masters is not None:
            self.masters.collect(new_pass=new_pass)

    @property
    def together(self) -> Together | None:
        """The ranks that agree on each step; None where what this rank finds is what all find.

        To ask may be a collective the first time. UsageError: see `Agreements.among`.
        """
        return self._agreements.among(self.params(), self._asked()) if several_processes() else None

    def before_backward(self) -> None:
        """Get the gradients that are there ready for a backward pass; see `MasterWeights.before_backward`."""
        if self.masters is not None:
            self.masters.before_backward()

    def has_gradients(self, params: Sequence[torch.Tensor] | None = None) -> bool:
        """Tell whether any gradient is there; ``params`` is what `params` returns, if the caller has it at hand."""
        return any(param.grad is not None for param in (self.params() if params is None else params))

    def check_shards(self) -> None:
        """Raise UsageError where shards were put in the place of this optimizer's parameters."""
        halves = {} if self.masters is None else {id(master): half for half, master in self.masters.pairs}
        refuse_left_behind(self.name, [halves.get(id(param), param) for param in self.params()])

    def enter_block(self, scale: Scale) -> None:
        """Take note that a block has begun, and brought all gradients to ``scale``."""
        self.grads_scale, self.in_block = scale, True

    def leave_block(
        self, grads_scale: Scale, verdict: Verdict | None = None, delayed: LossScaler | None = None, params: Any = None
    ) -> None:
        """Take note of how a block ended.

        Args:
            grads_scale: The scale of the gradients now.
            verdict: What was found in them, if they were checked.
            delayed: The scaler of the block, if they are to be checked later.
            params: What `params` returns, if the caller has it at hand.
        """
        self.grads_scale = grads_scale
        params = self.params() if params is None else params
        self._end_delay()
        if delayed is not None:
            self._delayed = delayed, ScaledMark(params)
        several = several_processes()
        self._remember(params, several)
        if verdict is not None:
            self._note(verdict, self._all_looked_at(params) if several else None)

    def _all_looked_at(self, params: Sequence[torch.Tensor]) -> Looked | None:
        if self.reduced is not None and self.reduced.has_all(params):
            return Looked(None)
        return Looked(gradients_of(params))

    def leave_plain_block(self, scaler: LossScaler, scale: Scale) -> bool:
        """Unscale, check and take note of it, at the end of a block that is this optimizer's alone and not delayed.

        That is how most blocks end. It is done in few calls, each of which finds the processor's caches cold after a
        backward pass. False where anything is out of the ordinary, and nothing was done.
        """
        if self.masters is not None or self._delayed is not None or not scaler.checks:
            return False
        params = self.params()
        grads = gradients_of(params)
        found = self.usual.unscale_(grads, inverse_scale(scale), scaler.late.blank) if grads else None
        if found is None:
            return False
        self.grads_scale = 1.0
        looked = None
        if self.reduced is not None and self.reduced.has_all(params):
            self._mark, looked = GradientMark(params), Looked(None)
        elif several_processes():
            self._remember(params, several=True)
            looked = Looked(grads)
        else:
            self._mark = GradientMark(params)
        self._note(Verdict(scaler, scale, found), looked)
        self._unscaled = params, scaler, scale
        return True

    def _note(self, verdict: Verdict, looked: Looked | None = None) -> None:
        """Take note of a verdict, and of the gradients that it has just looked at, where these are all."""
        self.pending.append(verdict)
        self._last, self._agreed = (verdict.scaler, verdict.scale), False
        self._looked = looked

    def _remember(self, params: Sequence[torch.Tensor], several: bool) -> None:
        # Where the ranks of a mesh have no gradients of other parameters alike, they have those of shards alike.
        if several and has_shards(params):
            params = [param for param in params if is_sharded(param)]
        self._mark = GradientMark(params)

    def unscaled(self, params: Sequence[torch.Tensor], scaler: LossScaler, scale: Scale) -> None:
        """Take note of what a block unscaled. Gradients of all other tensors have its scale still."""
        self._unscaled = params, scaler, scale
        self._last, self._agreed = (scaler, scale), False

    def take_in_joined(self, params: Sequence[torch.Tensor] | None = None) -> None:
        """Unscale and check the gradients of what joined the optimizer after the last block.

        They are taken to be from that block. A gradient does not tell which backward pass made it, so one of a pass
        that was not scaled is divided too. ``params`` is what `params` returns, if the caller has it at hand.
        """
        if self._unscaled is None:
            return
        before, scaler, scale = self._unscaled
        params = self.params() if params is None else params
        if len(params) == len(before):
            return
        self._unscaled = params, scaler, scale
        known = set(map(id, before))
        joined = [p for p in params if p.grad is not None and id(p) not in known and not self._serves(p)]
        if joined:
            self._note(Verdict(scaler, scale, unscale_(joined, inverse_scale(scale), None, scaler.late.blank)))

    def expect(self, verdict: Verdict) -> None:
        """Take note of a backward pass from which gradients come with true values, and of the verdict on them."""
        self.finish_delayed()
        if len(self.pending) >= _MANY_VERDICTS and self.together is None:
            # Nobody steps. To read them all in one go now and then is enough.
            blamed = self.settle()
            self.pending = [] if blamed is None else [blamed]
        elif len(self.pending) >= _MANY_VERDICTS:
            # No scaler is told: the other ranks have not said anything.
            read_verdicts(self.pending)
            self.pending = [next((one for one in self.pending if one.overflowed), self.pending[-1])]
        self._note(verdict)

    def abandon(self, verdict: Verdict) -> None:
        """Take note that a verdict is on gradients that were dropped: it skips no step, and its scaler hears of it."""
        together = self.together
        if together is not None and together.asked and not self._agreed:
            # Other ranks may have dropped nothing, and do not wait to hear of it: the next step is skipped.
            return
        place = next(place for place, one in enumerate(self.pending) if _is_of(one, verdict))
        if together is not None and not self._agreed:
            self._agree(together)
        self._abandoned.append(self.pending.pop(place))
        if len(self._abandoned) >= _MANY_VERDICTS:
            self._settle_abandoned()

    def _settle_abandoned(self) -> None:
        abandoned, self._abandoned = self._abandoned, []
        read_verdicts(abandoned)
        # A scaler that is lower by now has nothing to learn from an overflow at a higher scale.
        settle_verdicts([one for one in abandoned if one.overflowed and float(one.scale) <= one.scaler.loss_scale])

    def forget_abandoned(self) -> None:
        """Settle verdicts whose gradients were dropped without a step; the scaler learns from them all the same."""
        if self.pending and (together := self.together) is not None:
            self._forget_together(together)
        elif self.pending:
            # Where an overflow was cleared all is 0 anyway: whoever clips that goes on to the step, which is skipped.
            cleared = any(verdict.cleared for verdict in self.pending)
            if self._mark.replaced() if cleared else self._mark.touched() and not self._has_nonzero_gradients():
                self.settle()
        if self._delayed is not None and self._delayed[1].dropped():
            self._end_delay()
            self.grads_scale = 1.0

    def _forget_together(self, together: Together) -> None:
        """Do for `forget_abandoned` what all ranks do alike.

        Those of a mesh have gradients of their shards alike, and drop them alike. Where the program asked for a group
        its ranks may have none: there the next step is skipped, and its scaler learns from that.
        """
        if together.asked or not self._mark.touched():
            return
        norm = None if self._mark.replaced() else self._own_norm(together, math.inf)
        ballot = self._agree(together, norm, largest=True)
        if norm is None or float(ballot.norm) == 0.0:
            self.settle()

    def _own_norm(self, together: Together | None, norm_type: float) -> torch.Tensor:
        return powered_norm([param for param in self.params() if param.grad is not None], together, norm_type)

    def _has_nonzero_gradients(self) -> bool:
        """Tell gradients that were written to, as by clipping, from those that were cleared. Waits for the device."""
        grads = [local_of(grad) for param in self.params() if (grad := param.grad) is not None]
        return bool(grads) and float(total_norm(grads, math.inf)) != 0.0

    def _end_delay(self) -> None:
        if self._delayed is not None:
            self._delayed[1].end()
            self._delayed = None

    def overflowed(self) -> bool:
        """Tell whether gradients since the last step overflowed; where there are none, whether that step was a skip.

        Where ranks agree on a step all of them have to ask.
        """
        if self.together is not None:
            self._look_again(self.params())
        read_verdicts(self.pending)
        return any(verdict.overflowed for verdict in self.pending) if self.pending else self.skips.last

    def finish_delayed(self) -> None:
        """Unscale and check what ``delay_unscale`` left scaled."""
        if self._delayed is None:
            return
        (scaler, mark), scale = self._delayed, self.grads_scale
        self._end_delay()
        self.grads_scale = 1.0
        if not mark.dropped():
            params = self.params()
            found = unscale_(params, inverse_scale(scale), self.usual, scaler.late.blank)
            several = several_processes()
            self._note(Verdict(scaler, scale, found), self._all_looked_at(params) if several else None)
            self._remember(params, several)

    def guarded_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return what an optimizer may call within its step: ``closure``, at lower scales until nothing overflows.

        Raises:
            NonFiniteGradientsError: When called: no lower scale is to be had, or it does not help.
        """

        def evaluate() -> Any:
            self._params_changed()
            loss, blamed = self.evaluate(closure)
            if blamed is not None:
                raise self.hopeless(blamed)
            return loss

        return evaluate

    def hopeless(self, blamed: Verdict) -> NonFiniteGradientsError:
        """Return the error for a closure that overflows at all scales with the step half done."""
        return NonFiniteGradientsError(
            f"gradients overflowed at loss scale {blamed.scale:g} when {self.name} called its closure in the middle of "
            "a step, and a lower scale is not to be had or does not help: the parameters are at an intermediate point. "
            "Load the last checkpoint; train with a lower static loss scale, bf16 or fp32"
        )

    def step(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step or skip: what ``optimizer.step(*args, **kwargs)`` does, where ``original`` does it without a guard.

        Raises:
            UsageError: A block of this optimizer is open.
            NonFiniteGradientsError: There were too many skips in a row.
        """
        result = self._step_or_skip(original, args, kwargs)
        self._on_stepped(self.skips)
        return result

    def _step_or_skip(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.in_block:
            raise UsageError(
                f"{self.name}.step() was called inside its scale_loss block, where gradients are still multiplied by "
                f"{self.grads_scale:g}; move optimizer.step() after the with block"
            )
        first = self.skips.steps == 0
        if first:
            self.check_shards()
        self.skips.steps += 1
        several = several_processes()
        self._on_step(self, several)
        self.last_step_ran = True
        self.collect()
        if self._delayed is not None:
            self.finish_delayed()
        params = self.params()
        self.take_in_joined(params)
        if several:
            self._look_again(params)
        if first and self._last is None and not self.pending:
            warn_of_unscaled_shards(self.name, params)
        closure = args[0] if args else kwargs.get("closure")
        try:
            if callable(closure):
                self.skips.last = False
                return (self.step_closure or StepGuard._step_with_closure)(self, closure, original, args, kwargs)
            return self._step_by_verdicts(params, original, args, kwargs)
        finally:
            # Ranks without a block or pass until the next step have to hear of those that have one.
            self._agreed = False
            self._params_changed()

    def _step_by_verdicts(
        self, params: Sequence[torch.Tensor], original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        found = None if self.pending else self._repeated.again()
        if isinstance(found, Verdict):
            self._repeated.warn(self.name)
            return self.skip(found)
        flag = self._settle_later() if found is None else found
        if flag is not None:
            self._repeated.remember(flag, params)
            with self._handed(flag):
                return self._call(original, args, kwargs)
        blamed = self.settle()
        self._repeated.remember(blamed, params)
        return self.skip(blamed) if blamed is not None else self.take(original, args, kwargs)

    def _params_changed(self) -> None:
        """Bring up to date what follows from the parameters, which a step may have changed."""
        casts = self._casts()
        if casts is not None:
            casts.cache.clear()
        # An optimizer that skipped by itself left the masters as they were, and so are the halves after this.
        if self.masters is not None and self.last_step_ran:
            self.masters.copy_down()

    def _look_again(self, params: Sequence[torch.Tensor]) -> None:
        """Look at the gradients as they are now where other ranks have a part in them: inf may have come from there.

        Where all ranks see the same after the reduction that is all. Else they agree, once for all that was found.
        """
        together = self._agreements.among(params, self._asked())
        if together is None and self.pending:
            last = self.pending[-1]
            if (now := self._found_now(params)) is not None:
                self.pending.append(Verdict(last.scaler, last.scale, now))
        elif together is not None and not self._agreed and self._may_be_scaled():
            self._agree(together)

    def _found_now(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Look for inf and nan in all gradients as they are now; None where the last verdict has seen all of that."""
        looked = self._looked
        if looked is not None and looked.still_holds(lambda: gradients_of(params)):
            return None
        return non_finite_now(params, self._usual_now)

    def _may_be_scaled(self) -> bool:
        """Tell whether a loss was scaled: here, or on another rank where this one has scaled none yet."""
        scaler = self._scaler()
        return self._last is not None or (scaler is not None and scaler.checks)

    def _last_scale(self) -> tuple[LossScaler, Scale]:
        if self._last is not None:
            return self._last
        scaler: Any = self._scaler()
        return scaler, scaler.loss_scale

    def agreed_norm(self, norm_type: float) -> torch.Tensor:
        """Return the p-th power of the norm of the gradients of all ranks; for ``inf`` the norm itself.

        Where ranks agree on a step they do so by the same collective, and the step needs no other.
        """
        self.collect()
        self.finish_delayed()
        self.take_in_joined()
        settle_partial(self.params(), halves_alone=False)
        together = self.together
        norm = self._own_norm(together, norm_type)
        return norm if together is None else self._agree(together, norm, largest=norm_type == math.inf).norm

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Clip the gradients of which `agreed_norm` was asked last; see `clip_`."""
        clip_(self.params(), norm, max_norm)

    def _agree(
        self, together: Together, norm: torch.Tensor | None = None, *, largest: bool = False, hopeless: bool = False
    ) -> Ballot:
        """Let all ranks know what each of them found, by one collective. Scalers are not told yet."""
        params = self.params()
        settle_partial(params, halves_alone=True)
        own = self.pending
        found = [
            verdict.found if verdict.overflowed is None else [torch.full((1,), float(verdict.overflowed))]
            for verdict in own
        ]
        # The block looked at them already. That can stand for this only where nothing was exchanged since: a reduction
        # by the program itself may have come, and torch's collectives do not count as writes (`Tensor._version`).
        now = self._found_now(params) or []
        ballot = Ballot(found, now, votes=bool(own), norm=norm, hopeless=hopeless).cast(together, largest=largest)
        self._agreed = True
        self.pending = [AgreedVerdict(verdict, ballot.verdict(place)) for place, verdict in enumerate(own)]
        if own or ballot.has_voters():
            self.pending.append(Verdict(*self._last_scale(), [ballot.now]))
        return ballot

    def _settle_later(self) -> torch.Tensor | None:
        """Settle the pending verdicts on their device and return the flag; None where they are to be read."""
        verdicts, optimizer = self.pending, self._optimizer()
        if not verdicts or self._abandoned or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return None
        if not self._takes_flags() or self._wants_flags():
            return None
        if may_compress():
            # What a compression remembers is dropped at the same step by all ranks, which have to know of it.
            return None
        scaler, scale = verdicts[0].scaler, verdicts[0].scale
        self.skips.wait_by(scaler.late)
        flag = settle_on_device(verdicts, functools.partial(self.skips.tell, scaler, number_of(scale)))
        if flag is not None:
            self.pending = []
            if (known := self.skips.news()) and self._gives_up(known):
                raise self._too_many_skips(scaler)
        return flag

    def _takes_flags(self) -> bool:
        """Tell whether a step that says it takes the flag of an overflow on its device then changes nothing.

        The convention is that of `torch.amp.GradScaler`. Not where the step has hooks, which would run in a skipped one
        too, nor where the program has given a flag itself.
        """
        optimizer: Any = self._optimizer()
        return (
            self._honours_flags
            and getattr(optimizer, "found_inf", None) is None
            and not getattr(optimizer, "_optimizer_step_pre_hooks", None)
            and not getattr(optimizer, "_optimizer_step_post_hooks", None)
        )

    @contextlib.contextmanager
    def _handed(self, flag: torch.Tensor) -> Iterator[None]:
        """Let the optimizer have the flag of an overflow as ``found_inf``, where it looks for it."""
        optimizer: Any = self._optimizer()
        optimizer.found_inf = flag
        try:
            yield
        finally:
            del optimizer.found_inf

    def settle(self) -> Verdict | None:
        """Read the pending verdicts, tell the scalers, and return the verdict to blame, if any."""
        pending, self.pending = self.pending, []
        if not self._abandoned:
            return settle_verdicts(pending)
        # All at once, since each read waits for the device.
        read_verdicts([*pending, *self._abandoned])
        blamed = settle_verdicts(pending)
        self._settle_abandoned()
        return blamed

    def take(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the optimizer step, with casts off."""
        self.skips.last = False
        result = self._call(original, args, kwargs)
        self.skips.count(False)
        return result

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self.stepping = self.stepping, True
        try:
            if self.masters is not None:
                asked = self._asked()
                self.masters.begin_step(local=asked is not None and asked.replicas == 1)
            casts = self._casts()
            if casts is not None:
                original = casts.local.with_casts_off(original)
            return original(*args, **kwargs)
        finally:
            self.stepping = before

    def skip(self, blamed: Verdict) -> None:
        """Count a step that is not taken.

        Raises:
            NonFiniteGradientsError: There were too many in a row.
        """
        self.last_step_ran = False
        optimizer: Any = self._optimizer()
        # A step was due and came: LR schedulers look at this before they complain about the order of calls.
        optimizer._opt_called = True
        self.skips.count(True, blamed.scaler, blamed.scale)
        if self._gives_up(self.skips.in_a_row):
            raise self._too_many_skips(blamed.scaler, blamed.cleared)

    def _gives_up(self, in_a_row: int) -> bool:
        return in_a_row >= self.max_consecutive_skips or self.skips.at_lowest >= _patience(self.max_consecutive_skips)

    def _too_many_skips(self, scaler: LossScaler, cleared: Sequence[torch.Tensor] = ()) -> NonFiniteGradientsError:
        optimizer: Any = self._optimizer()
        known = {id(param) for param in cleared}
        named = [(name, param.grad) for name, param in named_params(optimizer) if param.grad is not None]
        found = [name for name, param in named_params(optimizer) if id(param) in known] or non_finite(named)
        explained = self.skips.explanation
        limit = f"max_consecutive_skips={self.max_consecutive_skips} is the limit"
        lowest = ""
        if self.skips.at_lowest >= _patience(self.max_consecutive_skips):
            lowest = ", the lowest that it may be (min_loss_scale)"
            limit = f"a fifth of max_consecutive_skips={self.max_consecutive_skips} is the limit at that scale"
        return NonFiniteGradientsError(
            f"{self.skips.in_a_row} steps of {self.name} in a row were skipped for inf or nan in the gradients, "
            f"first in {found_on_ranks(self.name, found)}; the loss scale is {scaler.loss_scale:g}{lowest}. Look for "
            f"inf or nan in the data and the loss, for too high a learning rate, for ops that need fp32. {limit}"
            + ("" if explained is None else f". The last of them: {explained}"),
            overflow=explained,
        )

    def _step_with_closure(
        self, closure: Callable[[], Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step an optimizer that evaluates the loss itself, once (SGD) or many times (LBFGS).

        The closure is called when the optimizer calls it, since some move the parameters first (SAM). Where none has
        moved and no lower scale helps, the step is given up from within the first evaluation.
        """
        blamed = self.settle()
        if blamed is not None:
            return self.skip(blamed)
        later, versions, begun = self.guarded_closure(closure), versions_of(self.params()), False

        def evaluate() -> Any:
            nonlocal begun
            first, begun = not begun and versions == versions_of(self.params()), True
            if not first:
                return later()
            self._params_changed()
            loss, blamed = self.evaluate(closure)
            if blamed is not None:
                raise GivenUp(loss, blamed)
            return loss

        return self.take_with(evaluate, original, args, kwargs)

    def take_with(
        self, closure: Callable[[], Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Let the optimizer step with another closure, which may raise `GivenUp`: then this is a skip."""
        state: Any = getattr(self._optimizer(), "state", None)
        known = set(state) if isinstance(state, Mapping) else None
        try:
            if args:
                return self.take(original, (closure, *args[1:]), kwargs)
            return self.take(original, (), {**kwargs, "closure": closure})
        except GivenUp as given_up:
            for key in [] if known is None else [key for key in state if key not in known]:
                del state[key]
            self.skip(given_up.blamed)
            return given_up.loss

    def call(self, closure: Callable[[], Any]) -> Any:
        """Call a closure as outside of a step."""
        casts = self._casts()
        with contextlib.nullcontext() if casts is None else casts.evaluating(), torch.enable_grad():
            return closure()

    def evaluate(self, closure: Callable[[], Any], attempts: int | None = None) -> tuple[Any, Verdict | None]:
        """Evaluate a closure, at lower scales if it overflows. Returns its loss, and the verdict left to blame."""
        had_gradients = self.has_gradients()
        for attempt in range(attempts or _MAX_EVALUATIONS):
            if attempt and not had_gradients:
                # The closure may leave zero_grad() to the lines before the step: give it what it found at first.
                for param in self.params():
                    param.grad = None
            loss = self.call(closure)
            self.collect()
            self.finish_delayed()
            hopeless = not _is_finite(loss)
            if (together := self.together) is not None:
                hopeless = self._agree(together, hopeless=hopeless).is_hopeless()
            elif several_processes():
                self._look_again(self.params())
            # The pass may have had a lower scale than its scaler, so that is what tells whether there is a lower one.
            scales = [(verdict.scaler, verdict.scaler.loss_scale) for verdict in self.pending]
            blamed = self.settle()
            can_lower = any(scaler.loss_scale < before for scaler, before in scales)
            # A lower scale helps against large gradients, not against a loss that is inf already.
            if blamed is None or not can_lower or hopeless:
                break
        return loss, blamed


class GivenUp(BaseException):
    """Leaves an optimizer's step from within its closure."""

    def __init__(self, loss: Any, blamed: Verdict) -> None:
        super().__init__()
        self.loss = loss
        self.blamed = blamed


def _skipped(on_skip: Callable[[], None]) -> None:
    begin_compression_anew()
    on_skip()


def _is_of(verdict: Verdict, own: Verdict) -> bool:
    """Tell whether a verdict is this one, or what all ranks made of it."""
    while isinstance(verdict, AgreedVerdict):
        verdict = verdict.of
    return verdict is own


def _patience(max_consecutive_skips: int) -> int:
    """Return how many skips in a row are an error where the scale cannot be lowered.

    Such skips come of the data alone, and other data may be better: a run that survives them goes on.
    """
    return -(-max_consecutive_skips // 5)


def gradients_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients that are there, in the order of their parameters."""
    return [grad for param in params if (grad := param.grad) is not None]


def versions_of(params: Iterable[torch.Tensor]) -> list[int | None]:
    """Return the version of each tensor; see `version_of`."""
    return [version_of(param) for param in params]


def _honours_flags(kind: type[Any]) -> bool:
    """Tell whether a class that says it takes the flag of an overflow changes nothing in a step where that is set.

    Not one that wants a whole `GradScaler`, by an older convention. Nor a subclass with a step of its own that inherits
    ``_step_supports_amp_scaling`` from a class of torch: what its step does besides calling that one, it would do in a
    skipped step too.
    """
    step = getattr(kind, "step", None)
    if not callable(step) or "grad_scaler" in _parameters(step):
        return False
    # Torch wraps the step of each class, so it is in every class's dict; the wrapper has the module of what it wraps.
    if _is_torchs(getattr(step, "__module__", "")):
        return True
    own = [base for base in kind.__mro__ if not _is_torchs(base.__module__)]
    inherits = any(base not in own and base is not torch.optim.Optimizer for base in kind.__mro__[:-1])
    return not inherits or any("_step_supports_amp_scaling" in vars(base) for base in own)


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except ValueError:
        # What is written in C may have no signature.
        return ()


def _is_torchs(module: str) -> bool:
    return module.startswith("torch.optim.")


def _is_finite(loss: Any) -> bool:
    if isinstance(loss, torch.Tensor):
        return bool(loss.detach().isfinite().all())
    return not isinstance(loss, float) or math.isfinite(loss)
