"""The optimizers of a handle: their guards and masters, what the guards ask and tell, and blocks of their losses."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core.attach import ScalesItself, master_of, refuse_inner_groups, refuse_unguardable, stepped_params
from autoamp.core.block import NeedsWith, ScaledBlock, StillScaled
from autoamp.core.casts import CastState
from autoamp.core.gradients import several_processes, total_norm
from autoamp.core.guard import StepGuard
from autoamp.core.listeners import Listeners
from autoamp.core.loss_scale import LossScaler, LossScalers, Scale, as_list, scaled_loss
from autoamp.core.masters import MasterWeights
from autoamp.core.patch_sites import PatchSites
from autoamp.core.ranks import RequestedGroup, compare_ranks, rank_sets
from autoamp.core.steps import GuardHost, Steps, UnderflowWatch, check_optimizer
from autoamp.errors import UsageError, kind_of


class Guards(GuardHost[StepGuard]):
    """Guards optimizers as scaled losses come by, each from `initialize` or its first loss on, as long as it lives.

    Args:
        casts: Turned off while an optimizer steps.
        scalers: One for each ``loss_id``.

    Attributes:
        casts: As given; replaced at another call of `initialize`.
        loss_scalers: Those that were given, and all that came later.
        steps: How many there were, and what is known of the last one.
        models_with_masters: An optimizer that is guarded from now on gets masters if it steps parameters of these.
        running: The optimizers whose step runs now, each with its thread, by the id of the optimizer.
        still_scaled: The parameters whose gradients a block left scaled.
        facts: Returns the settings that all ranks have to have alike, by name, and the policy of each target; None
            for optimizers of no handle.
    """

    casts: CastState

    def __init__(self, casts: CastState, scalers: Sequence[LossScaler]) -> None:
        self.casts = casts
        self.loss_scalers = LossScalers(scalers)
        self.models_with_masters: weakref.WeakSet[Module] = weakref.WeakSet()
        self.running: dict[int, tuple[int, Any]] = {}
        self._guards: weakref.WeakKeyDictionary[Any, StepGuard] = weakref.WeakKeyDictionary()
        self._asked_for_all: RequestedGroup | None = None
        self._asked: weakref.WeakKeyDictionary[Any, RequestedGroup] = weakref.WeakKeyDictionary()
        self.facts: Callable[[], tuple[dict[str, str], dict[str, str]]] | None = None
        self.sites = PatchSites()
        self.listeners = Listeners()
        self.steps = Steps(self.listeners, self.loss_scalers.catch_up)
        self._vanishing = UnderflowWatch()
        self.still_scaled = StillScaled(lambda: self.guards)

    @property
    def scalers(self) -> list[LossScaler]:
        """The loss scalers, in the order of their entries in a checkpoint."""
        return self.loss_scalers.all

    @property
    def guards(self) -> list[StepGuard]:
        """The guards of all optimizers that live."""
        guards: Any = self._guards
        # Copied by one call, as another thread may guard an optimizer meanwhile.
        return [guard for optimizer, guard in list(guards.data.items()) if optimizer() is not None]

    def guard_of(self, optimizer: Any) -> StepGuard | None:
        """Return the optimizer's guard, None where it has none."""
        try:
            return self._guards.get(optimizer)
        except TypeError:
            # What no weak reference can be made to.
            return None

    def guard(self, optimizer: Any, *, check: bool = True) -> StepGuard:
        """Return the optimizer's guard, a new one the first time. UsageError: this is no optimizer to guard.

        Args:
            optimizer: Anything with ``param_groups`` and ``step``.
            check: Whether to warn, the first time, of settings that half parameters without masters cannot take.
        """
        guard = self.guard_of(optimizer)
        if guard is None:
            refuse_unguardable(optimizer)
            guard = self.guard_of(_wrapped_by(optimizer))
        if guard is None:
            wants_masters = steps_any_of(self.models_with_masters, optimizer)
            if wants_masters:
                refuse_inner_groups(optimizer)
            guard = self._put_guard(optimizer, MasterWeights(optimizer) if wants_masters else None)
            if check and guard.masters is None:
                check_optimizer(optimizer)
        return guard

    def _put_guard(self, optimizer: Any, masters: MasterWeights | None) -> StepGuard:
        if id(optimizer) in self.running:
            raise UsageError(
                f"The first scale_loss of {type(optimizer).__name__} came while its step() runs; pass what evaluates "
                "the loss as optimizer.step(closure), or call scale_loss before step()"
            )
        guard = self._guards[optimizer] = StepGuard(optimizer, lambda: self, masters=masters)
        return guard

    @property
    def has_masters(self) -> bool:
        """Whether an optimizer steps master weights, or will."""
        return bool(self.models_with_masters) or any(guard.masters is not None for guard in self.guards)

    def masters_of(self, optimizer: Any) -> MasterWeights | None:
        """Return an optimizer's masters, None where it has none."""
        guard = self.guard_of(optimizer)
        return None if guard is None else guard.masters

    def keep_masters(self, optimizer: Any, originals: Mapping[int, Tensor] | None = None) -> MasterWeights:
        """Let an optimizer step fp32 masters of its half parameters from now on."""
        masters = self.masters_of(optimizer)
        if masters is None:
            refuse_unguardable(optimizer)
            # First of all: what an earlier guard left scaled is in the gradients of the half parameters.
            self.hand_over(optimizer)
            masters = MasterWeights(optimizer, originals)
            self._put_guard(optimizer, masters)
        else:
            masters.add_missing_masters(originals)
        return masters

    def hand_over(self, optimizer: Any) -> MasterWeights | None:
        """Let go of an optimizer and return its masters, which stay in place."""
        guard = self._guards.pop(optimizer, None)
        if guard is None:
            return None
        guard.uninstall()
        return guard.masters

    def let_go(self, optimizers: Sequence[Any], params: Iterable[Tensor]) -> None:
        """Give these optimizers, and all that step one of the parameters, back what they had of these parameters."""
        params = list(params)
        meant = set(map(id, params))
        for optimizer, guard in list(self._guards.items()):
            masters = guard.masters
            own = [*stepped_params(optimizer), *([] if masters is None else (half for half, _ in masters.pairs))]
            if not (any(optimizer is named for named in optimizers) or any(id(param) in meant for param in own)):
                continue
            if masters is not None:
                masters.undo(params)
                if len(masters):
                    # It steps other models as well.
                    continue
                masters.undo()
            self.hand_over(optimizer)
            self.loss_scalers.forget_own(optimizer)

    def release(self) -> None:
        """Give every optimizer its step and its parameters back."""
        if self.steps.own_scale is not None:
            # Of the program's scaler nothing is kept but the number.
            self.steps.own_scale = float(self.steps.own_scale)
        # The optimizers live as long as this list does, and their guards refer to them weakly.
        optimizers = list(self._guards)
        # All guards go first: what one left scaled may be the gradients of a master that another one has too.
        for masters in [self.hand_over(optimizer) for optimizer in optimizers]:
            if masters is not None:
                masters.undo()
        for optimizer in list(self.loss_scalers.own):
            self.loss_scalers.forget_own(optimizer)

    # -- what guards ask and tell --

    def step_begins(self, guard: StepGuard, *, counts: bool) -> None:
        """Count a step, and compare settings with the ranks that step together with this one, once."""
        if counts:
            self.steps.begin(guard.history.step)
        if guard.grads.own_scalers:
            for scaler in guard.grads.own_scalers:
                self.steps.add_own(scaler)
            return
        if guard.masters is not None and not guard.scaled:
            self.check_underflow(guard.optimizer)
        self.compare_settings(guard)

    def refuse_scaled(self, guard: StepGuard) -> None:
        """Raise UsageError if gradients of the optimizer are scaled still, by a block that did not name it."""
        if self.still_scaled.any_noted:
            self.forget_added(guard)
            self.still_scaled.refuse(f"{guard.name} would use", guard.grads.leaves())

    def share_gradients(self, optimizer: Any) -> None:
        """Let an optimizer's masters, if it has some, have the gradients of their half parameters, scaled or not."""
        masters = self.masters_of(optimizer)
        if masters is not None:
            left = self.still_scaled.left(half for half, _ in masters.pairs)
            masters.share_gradients()
            for half, scale, reason in left:
                self.still_scaled.note([half, masters.get(half)], scale, reason)

    def forget_added(self, guard: StepGuard) -> None:
        """Forget that blocks left parameters scaled which the optimizer got since: these are going to be unscaled."""
        if added := guard.grads.added_params():
            pairs = () if guard.masters is None else guard.masters.pairs
            known = set(map(id, added))
            self.still_scaled.forget([*added, *(half for half, master in pairs if id(master) in known)])

    def compare_settings(self, guard: StepGuard) -> None:
        """Compare settings with the ranks that step together with this one, once; see `compare_ranks`."""
        if guard.compared_settings or not several_processes():
            return
        guard.compared_settings = True
        asked = self.requested_group(guard.optimizer)
        sets = rank_sets(stepped_params(guard.optimizer), () if asked is None else (asked.group,), master_of)
        if sets and self.facts is not None:
            facts, rules = self.facts()
            scalers = {f"loss scaler {number}": repr(scaler) for number, scaler in enumerate(self.scalers)}
            masters = {"masters": str(guard.masters is not None)}
            compare_ranks(sets, {**facts, **masters, **scalers}, rules)

    def check_underflow(self, optimizer: Any) -> None:
        """Warn if the gradients of a loss that nobody scales underflow in fp16."""
        if self.casts.dtype is torch.float16 and self.steps.own_scale is None:
            self._vanishing.look(optimizer, stepped_params(optimizer))

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

    def clip_grad_norm_(self, optimizers: Any, max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients of optimizers together; see `autoamp.core.Handle.clip_grad_norm_`."""
        guards = [self.guard(optimizer) for optimizer in as_list(optimizers)]
        for guard in guards:
            if guard.in_block:
                raise UsageError(
                    f"gradients of {guard.name} cannot be clipped inside its scale_loss block, where they are scaled; "
                    "call clip_grad_norm_ after the with block"
                )
        for guard in guards:
            self.refuse_scaled(guard)
            # Before anything is agreed on.
            self.compare_settings(guard)
        norm = joint_norm(guards, norm_type)
        for guard in guards:
            guard.grads.clip(norm, max_norm)
        return norm

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the scalers' state and the number of skips; all of it, or nothing.

        Raises:
            CheckpointError: A key is missing, unknown or of the wrong kind. The message names it.
        """
        skipped = self.loss_scalers.load_state_dict(state)
        self.steps.reset(self.steps.guarded, skipped)
        for guard in self.guards:
            # The skips in a row were those of the run that is left behind.
            guard.history.in_a_row = 0

    def optimizer_made(self, optimizer: Any) -> None:
        """Give a new optimizer masters, if it gets some, before a state is loaded into it."""
        if isinstance(optimizer, ScalesItself):
            return
        self.still_scaled.optimizer_made(optimizer)
        # A half-built optimizer has no groups.
        with contextlib.suppress(AttributeError):
            if steps_any_of(self.models_with_masters, optimizer):
                self.keep_masters(optimizer)


class LossBlock(NeedsWith):
    """What ``scale_loss`` returns: a context manager that yields ``loss.float() * scale`` within a `ScaledBlock`.

    Its beginning raises UsageError where the loss is no floating tensor, or an optimizer is none to guard.

    Args:
        owner: Guards the optimizers.
        loss: Made a scaled one.
        optimizers: The optimizer or optimizers that step by it.
        scaler: Gives the scale.
        delay_unscale: As for `ScaledBlock`.
    """

    # While it is open.
    _block: ScaledBlock | None = None

    def __init__(self, owner: Guards, loss: Any, optimizers: Any, scaler: LossScaler, delay_unscale: bool) -> None:
        self._owner, self._scaler, self._delay_unscale = owner, scaler, delay_unscale
        self._given: tuple[Any, Any] | None = (loss, optimizers)

    def __enter__(self) -> Tensor:
        if self._given is None:
            raise UsageError("a scale_loss block begins once; call scale_loss(loss, optimizer) again for another one")
        (loss, optimizers), owner, scaler = self._given, self._owner, self._scaler
        # What keeps this object keeps no graph by way of it.
        self._given = None
        if not isinstance(loss, Tensor):
            swapped = "the loss comes first: scale_loss(loss, optimizer)"
            remedy = swapped if isinstance(optimizers, Tensor) else "pass the loss itself, not loss.item()"
            raise UsageError(f"scale_loss() takes a floating tensor, not {kind_of(loss)}; {remedy}")
        if not loss.is_floating_point():
            raise UsageError(f"scale_loss() takes a floating tensor, and this loss is {loss.dtype}; check what made it")
        guards = [owner.guard(optimizer) for optimizer in as_list(optimizers)]
        left: Sequence[tuple[Tensor, Scale, str]] = ()
        for guard in guards:
            guard.scaled = True
        if owner.still_scaled.any_noted:
            for guard in guards:
                owner.forget_added(guard)
            left = owner.still_scaled.left(leaf for guard in guards for leaf in guard.grads.leaves())
        owner.steps.note(loss, scaler.scale_without_sync(), waits=True)
        block = ScaledBlock(guards, scaler, delay_unscale=self._delay_unscale)
        scale = block.__enter__()
        self._block = block
        try:
            for param, earlier, reason in left:
                # The block multiplied them by its scale once more.
                owner.still_scaled.note([param], earlier, reason)
            scaled = scaled_loss(loss, scale)
            if scaler.checks and not torch.compiler.is_compiling():
                block.watch(loss, scaled, owner.still_scaled)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return scaled

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        block, self._block = self._block, None
        try:
            if block is not None:
                block.__exit__(kind)
        finally:
            self._owner.casts.cache.clear()

    def __del__(self) -> None:
        # Of a program that begins and ends blocks itself, and was left by an exception between the two.
        if self._block is not None:
            self.__exit__(GeneratorExit)


def steps_any_of(models: Iterable[Module], optimizer: Any) -> bool:
    """Whether an optimizer steps a parameter of the models."""
    params = {id(param) for model in models for param in model.parameters()}
    return bool(params) and any(id(param) in params for param in stepped_params(optimizer))


def _wrapped_by(wrapper: Any) -> Any:
    """Return the optimizer that a wrapper hands its calls to, as those of accelerate and Fabric do; None for others.

    The gradients are there, in masters too, and the wrapper may not step each time when it is called.
    """
    inner = getattr(wrapper, "optimizer", None)
    return inner if getattr(inner, "param_groups", None) is wrapper.param_groups else None


def wrap_optimizer(
    optimizers: Guards, optimizer: Any, scalers: Sequence[LossScaler], check_active: Callable[[], object]
) -> Any:
    """Give an optimizer a ``scale_loss`` with scalers of its own; see `autoamp.core.Handle.wrap_optimizer`.

    Args:
        optimizers: Guards the optimizer.
        optimizer: Wrapped for the first time, or again with other scalers.
        scalers: One for each loss. A scaler that serves another loss already is copied.
        check_active: Raises UsageError where the handle is not active.
    """
    history = optimizers.guard(optimizer).history
    own, reference = optimizers.loss_scalers.give_own(optimizer, scalers), weakref.ref(optimizer)
    step, turns = history.steps, itertools.cycle(own)

    def scale_loss(loss: Tensor, *, delay_unscale: bool = False) -> contextlib.AbstractContextManager[Tensor]:
        nonlocal step, turns
        check_active()
        if step != history.steps:
            # The first loss of a step takes the first scaler, and so on.
            step, turns = history.steps, itertools.cycle(own)
        return LossBlock(optimizers, loss, reference(), next(turns), delay_unscale)

    optimizer.scale_loss = scale_loss
    return optimizer


def joint_norm(guards: Sequence[StepGuard], norm_type: float) -> Tensor:
    """Return the norm of the true gradients of all guards together, over all ranks that agree on their steps."""
    norm_type = float(norm_type)
    # Raises here, before anything is changed, for what is no type of a norm.
    none = total_norm((), norm_type)
    norms: list[Tensor] = []
    for guard in guards:
        guard.grads.collect()
        guard.grads.finish_delayed()
        norms.append(guard.grads.norm(norm_type))
    if not norms:
        return none
    every = torch.stack([norm.to(norms[0].device) for norm in norms])
    return every.amax() if norm_type == torch.inf else every.sum() ** (1.0 / norm_type)
