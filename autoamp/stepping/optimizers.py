"""The optimizers of a handle: what their guards ask and tell, blocks of their losses, and steps that no guard met."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.casting import CastState
from autoamp.errors import UsageError, kind_of, warn_user
from autoamp.program import Program, Subscriber
from autoamp.scaling import LossScaler, Scale, is_same_scale, scaled_loss, total_norm
from autoamp.stepping.attach import ScalesItself, guard_before, living_optimizers_and_modules, stepped_params
from autoamp.stepping.block import scaled_block
from autoamp.stepping.guard import StepGuard
from autoamp.stepping.guards import Guards, steps_any_of
from autoamp.stepping.loss_scalers import as_list
from autoamp.stepping.rank_consistency import compare_ranks, rank_sets
from autoamp.stepping.ranks import RequestedGroup, several_processes
from autoamp.stepping.scaled_backward import BackwardWatch, LeftScaled
from autoamp.stepping.setting_warnings import UnderflowWatch
from autoamp.stepping.skips import Step


class GuardedOptimizers(Guards):
    """Guards optimizers as scaled losses come by. It is the owner of their guards.

    Args:
        casts: Turned off while an optimizer steps.
        scalers: One for each ``loss_id``.

    Attributes:
        casts: As given; replaced at another call of `initialize`.
        left_scaled: The parameters whose gradients a block left scaled.
        facts: Returns the settings that all ranks have to have alike, by name, and the policy of each target; None
            for optimizers of no handle.
    """

    casts: CastState

    def __init__(self, casts: CastState, scalers: Sequence[LossScaler]) -> None:
        super().__init__(scalers)
        self.casts = casts
        self._asked_for_all: RequestedGroup | None = None
        self._asked: weakref.WeakKeyDictionary[Any, RequestedGroup] = weakref.WeakKeyDictionary()
        self.facts: Callable[[], tuple[dict[str, str], dict[str, str]]] | None = None
        self.program = Program()
        self._vanishing = UnderflowWatch()
        self.left_scaled = LeftScaled()
        # All optimizers of torch's class; None until a backward pass of a scaled loss asks for them.
        self._living: weakref.WeakSet[Any] | None = None
        # The parameters that none of them had by then: one that is made later may step them.
        self._in_no_optimizer: list[weakref.ref[Tensor]] = []

    @property
    def scalers(self) -> list[LossScaler]:
        """The loss scalers, in the order of their entries in a checkpoint."""
        return self.loss_scalers.all

    # -- what guards ask and tell --

    def step_begins(self, guard: StepGuard) -> None:
        """Count a step, and compare settings with the ranks that step together with this one, once."""
        self.program.tell(Subscriber.step_begins)
        self.step_stats.step_begins(guard.skips.step)
        if guard.pending.own_scalers:
            for scaler in guard.pending.own_scalers:
                self.step_stats.add_own(scaler)
            return
        if guard.masters is not None and not guard.scaled:
            self.check_underflow(guard.optimizer)
        self.compare_settings(guard)

    def refuse_scaled(self, guard: StepGuard) -> None:
        """Raise UsageError if gradients of the optimizer are scaled still, by a block that did not name it."""
        self._forget_added(guard)
        self.left_scaled.refuse(f"{guard.name} would use", guard.grads.leaves())

    def share_gradients(self, optimizer: Any) -> None:
        """Let an optimizer's masters, if it has some, have the gradients of their half parameters, scaled or not."""
        masters = self.masters_of(optimizer)
        if masters is not None:
            left = self.left_scaled.left(half for half, _ in masters.pairs)
            masters.share_gradients()
            for half, scale, reason in left:
                self.left_scaled.note([half, masters.get(half)], scale, reason)

    def _forget_added(self, guard: StepGuard) -> None:
        """Forget what blocks left scaled in an optimizer that got parameters since: these are going to be unscaled."""
        if self.left_scaled and guard.pending.has_added_params:
            self.left_scaled.forget(guard.grads.leaves())

    def compare_settings(self, guard: StepGuard) -> None:
        """Compare settings with the ranks that step together with this one, once; see `compare_ranks`."""
        if guard.compared_settings or not several_processes():
            return
        guard.compared_settings = True
        asked = self.requested_group(guard.optimizer)
        sets = rank_sets(stepped_params(guard.optimizer), () if asked is None else (asked.group,))
        if sets and self.facts is not None:
            facts, rules = self.facts()
            scalers = {f"loss scaler {number}": repr(scaler) for number, scaler in enumerate(self.scalers)}
            masters = {"masters": str(guard.masters is not None)}
            compare_ranks(sets, {**facts, **masters, **scalers}, rules)

    def plain_step_begins(self, optimizer: Any) -> Step:
        """Begin a step of an optimizer without loss scaling. UsageError: its gradients are scaled all the same."""
        self.left_scaled.refuse(f"{type(optimizer).__name__} would use", stepped_params(optimizer))
        self.program.tell(Subscriber.step_begins)
        self.check_underflow(optimizer)
        self.step_stats.last = Step()
        return self.step_stats.last

    def check_underflow(self, optimizer: Any) -> None:
        """Warn if the gradients of a loss that nobody scales underflow in fp16."""
        if self.casts.dtype is torch.float16 and self.step_stats.own_scale is None:
            self._vanishing.look(optimizer, stepped_params(optimizer))

    def step_skipped(self) -> None:
        """Count a skip."""
        self.step_stats.add_skip()

    def requested_group(self, optimizer: Any) -> RequestedGroup | None:
        """Return the process group over which the program wants steps to be agreed on, if it asked for one."""
        return self._asked.get(optimizer, self._asked_for_all)

    def sync_over(self, asked: RequestedGroup, optimizers: Iterable[Any] | None) -> None:
        """Let the ranks of a process group agree on each step of these optimizers from now on; None for all."""
        if optimizers is None:
            self._asked_for_all = asked
        else:
            self._asked.update((optimizer, asked) for optimizer in optimizers)

    # -- losses --

    def scaled(
        self, loss: Any, optimizers: Any, scaler: LossScaler, delay_unscale: bool
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Return a context manager over ``loss.float() * scale``; see `autoamp.runtime.Handle.scale_loss`."""
        if not isinstance(loss, Tensor):
            message = f"scale_loss() takes a floating tensor, not {kind_of(loss)}; pass the loss, not loss.item()"
            raise UsageError(message)
        if not loss.is_floating_point():
            raise UsageError(f"scale_loss() takes a floating tensor, and this loss is {loss.dtype}; check what made it")
        guards = [self.guard(optimizer) for optimizer in as_list(optimizers)]
        for guard in guards:
            guard.scaled = True
            self._forget_added(guard)
        self.program.tell(Subscriber.backward_begins, loss, scaler.scale_without_sync())
        return self._block(loss, guards, scaler, delay_unscale)

    @contextlib.contextmanager
    def _block(
        self, loss: Tensor, guards: Sequence[StepGuard], scaler: LossScaler, delay_unscale: bool
    ) -> Iterator[Tensor]:
        """Yield the loss times its scale within a `scaled_block`, and drop kept casts at its end."""
        left = self.left_scaled.left(leaf for guard in guards for leaf in guard.grads.leaves())
        try:
            with scaled_block(guards, scaler, delay_unscale=delay_unscale) as scale:
                for param, earlier, reason in left:
                    # The block multiplied them by its scale once more.
                    self.left_scaled.note([param], earlier, reason)
                scaled = scaled_loss(loss, scale)
                watches = scaler.checks and not torch.compiler.is_compiling()
                watch = self.watch_pass(loss, scaled, scale, guards) if watches else None
                with contextlib.nullcontext() if watch is None else watch:
                    yield scaled
        finally:
            self.casts.cache.clear()

    def watch_pass(self, loss: Tensor, scaled: Tensor, scale: Scale, guards: Sequence[StepGuard]) -> BackwardWatch:
        """Return what sees the backward passes of a scaled loss; see `BackwardWatch`."""
        return BackwardWatch(loss, scaled, scale, guards, self._params_of_others, self.left_scaled)

    def _params_of_others(self, guards: Sequence[StepGuard], scale: Scale) -> list[Tensor]:
        """Return the leaves of all other optimizers whose gradients have another scale, and of no optimizer.

        Args:
            guards: Those of a block. What their optimizers step as well is left out.
            scale: Of the block.
        """
        if self._living is None:
            self._find_living()
        theirs: dict[Any, None] = dict.fromkeys(self.guards)
        others = [param for reference in self._in_no_optimizer if (param := reference()) is not None]
        for optimizer in self._living or ():
            if (guard := guard_before(optimizer)) is None:
                others += stepped_params(optimizer)
            else:
                # That of an `FP16_Optimizer` is none of the handle's.
                theirs[guard] = None
        left_out: set[int] = set()
        for guard in theirs:
            if guard in guards or is_same_scale(guard.grads.scale, scale):
                left_out.update(map(id, guard.grads.leaves()))
            else:
                others += guard.grads.leaves()
        return list({id(param): param for param in others if id(param) not in left_out}.values())

    def _find_living(self) -> None:
        """Find all optimizers of torch's class, and the parameters of modules that none of them steps."""
        optimizers, modules = living_optimizers_and_modules()
        self._living = weakref.WeakSet(optimizers)
        held = {id(param) for guard in self.guards for param in guard.grads.leaves()}
        for optimizer in optimizers:
            guard = guard_before(optimizer)
            held.update(map(id, stepped_params(optimizer) if guard is None else guard.grads.leaves()))
        # A module that is half built has no parameters.
        found = (param for module in modules for param in vars(module).get("_parameters", {}).values())
        self._in_no_optimizer = [weakref.ref(one) for one in found if one is not None and id(one) not in held]

    def use_scalers(self, scalers: list[LossScaler], optimizers: Iterable[Any]) -> None:
        """Give scalers to these optimizers, as `LossScalers.use` does, and count steps and skips anew."""
        self.loss_scalers.use(scalers, optimizers)
        self.step_stats.reset()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the scalers' state and the number of skips; all of it, or nothing.

        Raises:
            CheckpointError: A key is missing, unknown or of the wrong kind. The message names it.
        """
        steps, skipped = self.step_stats.steps, self.loss_scalers.load_state_dict(state)
        self.step_stats.reset(skipped)
        self.step_stats.steps = steps
        for guard in self.guards:
            # The skips in a row were those of the run that is left behind.
            guard.skips.catch_up()
            guard.skips.in_a_row = 0

    def optimizer_made(self, optimizer: Any) -> None:
        """Give a new optimizer masters, if it gets some, before a state is loaded into it."""
        if isinstance(optimizer, ScalesItself):
            return
        if self._living is not None:
            self._living.add(optimizer)
        # A half-built optimizer has no groups.
        with contextlib.suppress(AttributeError):
            if steps_any_of(self.models_with_masters, optimizer):
                self.keep_masters(optimizer)


class OptimizerSteps(Subscriber):
    """Stands around all steps of torch's optimizers while the handle is active, and looks at what clips gradients.

    Args:
        optimizers: Those of the handle, with their guards.
    """

    def __init__(self, optimizers: GuardedOptimizers) -> None:
        self._optimizers = optimizers
        self._active = False
        self._warned_of_clipping = False

    def started(self) -> None:
        """Stand around steps."""
        self._active = True

    def stopped(self) -> None:
        """Let all steps go as without a handle, also by replacements that somebody has kept."""
        self._active = False

    def optimizer_made(self, optimizer: Any) -> None:
        """Give a new optimizer masters, if it gets some."""
        if self._active:
            self._optimizers.optimizer_made(optimizer)

    def around_step(self, step: Any) -> Any:
        """Return a step that the optimizer's guard, if it has one, takes or skips."""
        compiling = torch.compiler.is_dynamo_compiling

        @functools.wraps(step)
        def guarded_step(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active or compiling() or id(self_) in self._optimizers.running:
                return step(self_, *args, **kwargs)
            return self._step(step, self_, args, kwargs)

        return guarded_step

    def _step(self, original: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step of any optimizer with casts off; through its guard, if the call went past that."""
        optimizers = self._optimizers
        guard, plain_step = optimizers.guard_of(optimizer), None
        # An FP16_Optimizer has a guard that is none of the handle's, and so has the optimizer inside of it.
        if guard is None and not isinstance(optimizer, ScalesItself) and guard_before(optimizer) is None:
            optimizers.program.tell(Subscriber.unguarded_step, optimizer)
            guard = optimizers.guard_of(optimizer) or optimizers.guard_around(optimizer)
            if guard is None and callable(args[0] if args else kwargs.get("closure")):
                # Now: when the closure scales the first loss, the step has begun already.
                guard = optimizers.guard(optimizer)
            plain_step = optimizers.plain_step_begins(optimizer) if guard is None else None
        if guard is not None and not guard.stepping:
            return guard.step(functools.partial(original, optimizer), args, kwargs)
        optimizers.running.add(id(optimizer))
        try:
            result = None
            if plain_step is not None and any(optimizers.program.tell(Subscriber.refuses_step, optimizer, None)):
                plain_step.skipped_by = "on_nonfinite"
            else:
                result = optimizers.casts.local.with_mode(original, False)(optimizer, *args, **kwargs)
        finally:
            optimizers.running.discard(id(optimizer))
        if plain_step is not None:
            optimizers.step_stats.plain += 1
            optimizers.program.tell(Subscriber.step_ended, plain_step)
        optimizers.casts.cache.clear()
        return result

    def clips_gradients(self, function: str, params: Iterable[Tensor]) -> None:
        """Refuse to clip gradients that a block left scaled; warn once of clipping within or between blocks."""
        self._optimizers.left_scaled.refuse(f"{function} would clip", params)
        if self._warned_of_clipping:
            return
        clipped = set(map(id, params))
        for guard in self._optimizers.guards:
            grads = guard.grads
            is_scaled = (guard.in_block or grads.delayed is not None) and not is_same_scale(grads.scale, 1.0)
            if is_scaled and not clipped.isdisjoint(map(id, grads.leaves())):
                self._warned_of_clipping = True
                warn_user(
                    f"{function} was called inside the scale_loss block of {guard.name}, or after one with "
                    "delay_unscale=True, where gradients are multiplied by the loss scale: it clips nearly everything. "
                    "Call it after the with block of the last loss, which has no delay_unscale, before optimizer.step()"
                )
                return


def wrap_optimizer(
    optimizers: GuardedOptimizers, optimizer: Any, scalers: Sequence[LossScaler], check_active: Callable[[], None]
) -> Any:
    """Give an optimizer a ``scale_loss`` with scalers of its own; see `autoamp.runtime.Handle.wrap_optimizer`.

    Args:
        optimizers: Guards the optimizer.
        optimizer: Wrapped for the first time, or again with other scalers.
        scalers: One for each loss. A scaler that serves another loss already is copied.
        check_active: Raises UsageError where the handle is not active.
    """
    skips = optimizers.guard(optimizer).skips
    own, reference = optimizers.loss_scalers.give_own(optimizer, scalers), weakref.ref(optimizer)
    step, turns = skips.steps, itertools.cycle(own)

    def scale_loss(loss: Tensor, *, delay_unscale: bool = False) -> contextlib.AbstractContextManager[Tensor]:
        nonlocal step, turns
        check_active()
        if step != skips.steps:
            # The first loss of a step takes the first scaler, and so on.
            step, turns = skips.steps, itertools.cycle(own)
        return optimizers.scaled(loss, reference(), next(turns), delay_unscale)

    optimizer.scale_loss = scale_loss
    return optimizer


def clip_grad_norm_(registry: GuardedOptimizers, optimizers: Any, max_norm: float, norm_type: float) -> Tensor:
    """Clip the gradients of optimizers together; see `autoamp.runtime.Handle.clip_grad_norm_`."""
    guards = [registry.guard(optimizer) for optimizer in as_list(optimizers)]
    for guard in guards:
        if guard.in_block:
            raise UsageError(
                f"gradients of {guard.name} cannot be clipped inside its scale_loss block, where they are scaled; "
                "call clip_grad_norm_ after the with block"
            )
    for guard in guards:
        registry.refuse_scaled(guard)
        # Before anything is agreed on.
        registry.compare_settings(guard)
    norm = joint_norm(guards, norm_type)
    for guard in guards:
        guard.pending.clip(norm, max_norm)
    return norm


def joint_norm(guards: Sequence[StepGuard], norm_type: float) -> Tensor:
    """Return the norm of the true gradients of all guards together, over all ranks that agree on their steps."""
    norm_type = float(norm_type)
    # Raises here, before anything is changed, for what is no type of a norm.
    none = total_norm((), norm_type)
    norms: list[Tensor] = []
    for guard in guards:
        guard.grads.collect()
        guard.pending.finish_delayed()
        guard.pending.unscale_added_params()
        norms.append(guard.pending.norm(norm_type))
    if not norms:
        return none
    every = torch.stack([norm.to(norms[0].device) for norm in norms])
    return every.amax() if norm_type == torch.inf else every.sum() ** (1.0 / norm_type)
