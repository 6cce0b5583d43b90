"""The optimizers of a handle: their guards and master weights, blocks of their losses, and the skips of them all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from autoamp.casting import Casts
from autoamp.errors import UsageError, warn_user
from autoamp.scaling import AskedGroup, DynamicLossScaler, LossScaler, multiplied_loss
from autoamp.stepping.attach import (
    AttachedStep,
    InnerSteps,
    ScalesItself,
    is_optimizer,
    refuse_own_scaler,
    stepped_params,
)
from autoamp.stepping.block import open_blocks, scaled_block
from autoamp.stepping.checks import check_half_params, check_optimizer
from autoamp.stepping.digest import compare_ranks, rank_sets
from autoamp.stepping.guard import StepGuard
from autoamp.stepping.loss_scalers import LossScalers, listed
from autoamp.stepping.masters import MasterWeights
from autoamp.stepping.reduced import Reduced, wrappers_of
from autoamp.stepping.replicas import several_processes
from autoamp.stepping.sharded_modules import warn_of_unscaled_shards
from autoamp.stepping.skips import Rehearsing, Skips, StepWatch
from autoamp.stepping.usage_checks import BackwardWatch, ClippingWatch, VanishingGradients

__all__ = ["GuardedOptimizers"]


@dataclasses.dataclass
class OwnSteps:
    """Steps of optimizers that scale their losses themselves, of all together.

    Attributes:
        scalers: The loss scaler of each optimizer, by what is known of its steps.
    """

    scalers: dict[Skips, LossScaler] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps there were, skips included."""
        return sum(skips.steps for skips in self.scalers)

    @property
    def skipped(self) -> int:
        """How many of the steps were skips. Waits for the device where that alone knows."""
        return sum(skips.total for skips in self.scalers)

    @property
    def losses(self) -> list[LossScaler]:
        """The loss scalers, each once."""
        return list(dict.fromkeys(self.scalers.values()))

    @property
    def loss_scale(self) -> float:
        """The scale of the last optimizer. Waits as `skipped` does."""
        for skips in self.scalers:
            # Scalers hear of skips no earlier than somebody asks.
            skips.catch_up()
        return list(self.scalers.values())[-1].loss_scale


class _ScaledLoss:
    """A block over its loss times its scale, after which kept casts are dropped.

    A class and no generator, since each step leaves it, with cold caches after a backward pass.

    Args:
        loss: Not scaled.
        block: Gives the scale.
        casts: Those that are kept.
    """

    __slots__ = ("_block", "_casts", "_loss")

    def __init__(self, loss: Tensor, block: scaled_block, casts: Casts) -> None:
        self._loss, self._block, self._casts = loss, block, casts

    def __enter__(self) -> Tensor:
        scale = self._block.__enter__()
        try:
            return multiplied_loss(self._loss, scale)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._block.__exit__(kind, error, trace)
        finally:
            self._casts.cache.clear()


class GuardedOptimizers:
    """Guards optimizers as scaled losses come by.

    Args:
        casts: Turned off while an optimizer steps.
        scalers: One for each ``loss_id``.

    Attributes:
        loss_scalers: Those that were given, and all that came later.
        steps: How many steps of optimizers there were, skips included.
        guarded: How many optimizers were ever guarded.
        own: What the program's own `FP16_Optimizer` did; None where it has none.
        masters_for_all: Whether every optimizer that is guarded from now on gets masters for its half parameters.
        by_level: Whether `initialize` set them up, which warns of half models itself.
        max_consecutive_skips: So many skips of one optimizer in a row are an error.
        watch: What looks on, if anything does.
        on_stepped: Called with what is known of an optimizer's steps after each of them, with None for an optimizer
            whose losses nobody scales; None where nobody asks.
        on_unguarded: Called with an optimizer that steps and has no guard, which may give it one; None where nobody
            asks.
        rehearsal: Takes the losses and the steps of a step that is rehearsed, while that runs.
        facts: Gives the settings that all ranks have to have alike, by name.
        rules: Gives the policy of each target, which they have to have alike too.
        clipping: Looks for scaled gradients that torch's functions clip.
    """

    def __init__(self, casts: Casts, scalers: Sequence[LossScaler]) -> None:
        self.loss_scalers = LossScalers(scalers)
        self._check: Callable[[], None] = lambda: None
        self._steps_halves: Callable[[Any], bool] = lambda _: False
        self.steps = 0
        self._skipped_steps = 0
        self._last: Skips | None = None
        self.guarded = 0
        self.own: OwnSteps | None = None
        self.masters_for_all = False
        self.by_level = False
        self.max_consecutive_skips = 50
        self.watch: StepWatch | None = None
        self.rehearsal: Rehearsing | None = None
        self.on_stepped: Callable[[Skips | None], None] | None = None
        self.on_unguarded: Callable[[Any], None] | None = None
        self._plain_steps = 0
        self._casts = casts
        self._guards: weakref.WeakKeyDictionary[Any, StepGuard] = weakref.WeakKeyDictionary()
        self._asked_for_all: AskedGroup | None = None
        self._asked: weakref.WeakKeyDictionary[Any, AskedGroup] = weakref.WeakKeyDictionary()
        self._inner_steps: InnerSteps | None = None
        self.facts: Callable[[], dict[str, str]] = dict
        self.rules: Callable[[], dict[str, str]] = dict
        # Optimizers that stepped without a guard.
        self._unscaled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._vanishing = VanishingGradients()
        self.clipping = ClippingWatch(self._scaled_now)
        # Optimizers whose state was loaded before any step, while nobody loaded loss scales.
        self._resumed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._scales_loaded = False

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped, of all optimizers together. Waits for the device where that alone knows."""
        self._catch_up()
        return self._skipped_steps

    @property
    def all_steps(self) -> int:
        """How many steps there were: skips, those of `FP16_Optimizer` and of losses that nobody scales included."""
        return self.steps + self._plain_steps + (0 if self.own is None else self.own.steps)

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step of any optimizer was a skip. Waits as `skipped_steps` does."""
        return self._last is not None and self._last.last

    def _catch_up(self) -> None:
        for guard in self.guards:
            guard.skips.catch_up()
        # These hear of the steps of optimizers that are gone, too.
        self.loss_scalers.catch_up()

    def _count_step(self, optimizer: weakref.ref[Any], guard: StepGuard, several: bool) -> None:
        if self.rehearsal is not None:
            guard.skips.steps -= 1
            raise self.rehearsal.step_reached()
        self.steps += 1
        self._last = guard.skips
        if guard.masters is not None and not guard.scaled and self._casts.dtype is torch.float16:
            self._vanishing.look(optimizer(), guard.params())
        if self.watch is not None:
            self.watch.step_begins()
        if several and guard.reduced is None:
            self._meet_ranks(optimizer(), guard)

    def _meet_ranks(self, optimizer: Any, guard: StepGuard) -> None:
        """Compare settings with the ranks that step together with this one, once; see `compare_ranks`."""
        params = stepped_params(optimizer)
        wrappers = wrappers_of(params)
        guard.reduced = Reduced(params, wrappers)
        groups = [wrapper.process_group for wrapper in wrappers]
        asked = self.asked_of(weakref.ref(optimizer))
        sets = rank_sets(params, groups if asked is None else [*groups, asked.group])
        if sets:
            scalers = {f"loss scaler {number}": repr(scaler) for number, scaler in enumerate(self.scalers)}
            masters = {"masters": str(self.masters_of(optimizer) is not None)}
            compare_ranks(sets, {**self.facts(), **masters, **scalers}, self.rules())

    def _count_skip(self) -> None:
        self._skipped_steps += 1

    @property
    def guards(self) -> list[StepGuard]:
        """The guards of all optimizers that live."""
        return list(self._guards.values())

    def use_scalers(self, scalers: list[LossScaler], optimizers: Iterable[Any]) -> None:
        """Give scalers to these optimizers, as `LossScalers.use` does, and count steps and skips anew."""
        self.loss_scalers.use(scalers, optimizers)
        self._catch_up()
        self.steps = self._skipped_steps = 0

    def serve(self, casts: Casts, check: Callable[[], None]) -> None:
        """Belong to another handle from now on; ``check`` raises where that one is not active."""
        self._casts, self._check = casts, check

    def keep_masters_for_all(self, but: Callable[[Any], bool]) -> None:
        """Give every optimizer that is guarded from now on masters, but those of which ``but`` is true."""
        self.masters_for_all, self._steps_halves = True, but

    def scaled(
        self, loss: Any, optimizers: Any, scaler: LossScaler, delay_unscale: bool
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Return a context manager over ``loss.float() * scale``; see `autoamp.runtime.Handle.scale_loss`."""
        if not isinstance(loss, Tensor):
            kind = type(loss).__name__
            raise UsageError(f"scale_loss() takes a floating tensor, not a {kind}; pass the loss, not loss.item()")
        if not loss.is_floating_point():
            raise UsageError(f"scale_loss() takes a floating tensor, and this loss is {loss.dtype}; check what made it")
        if self.rehearsal is not None:
            return self.rehearsal.scaled(loss)
        guards = [self.guard(optimizer) for optimizer in listed(optimizers)]
        for guard in guards:
            guard.scaled = True
        self.warn_of_resumed(listed(optimizers), scaler)
        if self.watch is not None:
            self.watch.loss_scaled(loss, scaler.scale_at_hand())
        block = _ScaledLoss(loss, scaled_block(guards, scaler, delay_unscale=delay_unscale), self._casts)
        if all(guard.proven for guard in guards) or not scaler.checks or torch.compiler.is_compiling():
            return block
        return self._watched(block, loss, guards)

    @contextlib.contextmanager
    def _watched(self, block: _ScaledLoss, loss: Tensor, guards: Sequence[StepGuard]) -> Iterator[Tensor]:
        """See to it that a block runs the scaled loss backward, until one of each optimizer did."""
        with block as scaled:
            watch, differentiated = BackwardWatch(loss, scaled), open_blocks.differentiated
            try:
                yield scaled
            finally:
                watch.end()
            if open_blocks.differentiated == differentiated:
                watch.check(guards[0].name)
            for guard in guards:
                guard.proven = guard.proven or watch.proven

    def guard(self, optimizer: Any, *, check: bool = True) -> StepGuard:
        """Return the optimizer's guard, a new one the first time. UsageError: this is no optimizer to guard.

        Args:
            optimizer: Anything with ``param_groups`` and ``step``.
            check: Whether to warn, the first time, of settings that half parameters without masters cannot take.
        """
        try:
            guard = self._guards.get(optimizer)
        except TypeError:
            # What no weak reference can be made to: None, a dict, a set.
            raise UsageError(_not_an_optimizer(optimizer)) from None
        if guard is None:
            if not is_optimizer(optimizer):
                raise UsageError(_not_an_optimizer(optimizer))
            refuse_own_scaler(optimizer)
            guard = self._guard_within(optimizer)
        if guard is None:
            masters = MasterWeights(optimizer) if self.masters_for_all and not self._steps_halves(optimizer) else None
            guard = self._put_guard(optimizer, masters)
            if check and masters is None:
                check_optimizer(optimizer)
                if not self.by_level:
                    check_half_params(optimizer)
        guard.max_consecutive_skips = self.max_consecutive_skips
        return guard

    def _guard_within(self, wrapper: Any) -> StepGuard | None:
        """Return the guard of the optimizer that a wrapper hands its calls to, as those of accelerate and Fabric do.

        The gradients are there, in masters too, and the wrapper may not step each time when it is called.
        """
        inner = getattr(wrapper, "optimizer", None)
        if getattr(inner, "param_groups", None) is not wrapper.param_groups:
            return None
        try:
            return self._guards.get(inner)
        except TypeError:
            return None

    def _put_guard(self, optimizer: Any, masters: MasterWeights | None) -> StepGuard:
        guard = StepGuard(
            optimizer,
            masters=masters,
            casts=lambda: self._casts,
            on_step=functools.partial(self._count_step, weakref.ref(optimizer)),
            on_skip=self._count_skip,
            serves=functools.partial(self._is_served, weakref.ref(optimizer)),
            asked=functools.partial(self.asked_of, weakref.ref(optimizer)),
            scaler=lambda: self.scalers[0] if self.scalers else None,
            max_consecutive_skips=self.max_consecutive_skips,
            wants_flags=self.wants_flags,
            on_stepped=self.tell_stepped,
        )
        guard.skips.watched = self
        guard.install()
        self._guards[optimizer] = guard
        self.guarded += 1
        return guard

    def tell_stepped(self, skips: Skips | None) -> None:
        """Let who asked for it know that an optimizer's step has ended; None for one that is never skipped."""
        if self.on_stepped is not None:
            self.on_stepped(skips)

    def wants_flags(self) -> bool:
        """Tell whether a flag is to be read that could stay on the device."""
        return self.watch is not None and self.watch.wants_flags

    def sync_over(self, asked: AskedGroup, optimizers: Iterable[Any] | None) -> None:
        """Let the ranks of a process group agree on each step of these optimizers from now on; None for all."""
        if optimizers is None:
            self._asked_for_all = asked
        else:
            self._asked.update((optimizer, asked) for optimizer in optimizers)

    def asked_of(self, optimizer: weakref.ref[Any]) -> AskedGroup | None:
        """Return the group that was asked for, for an optimizer."""
        return self._asked.get(optimizer(), self._asked_for_all)

    def clip(self, optimizers: Any, max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients of optimizers together; see `autoamp.runtime.Handle.clip_grad_norm_`."""
        norm_type = float(norm_type)
        if not norm_type > 0.0:
            raise UsageError(f"norm_type={norm_type!r} must be above 0; choose 2.0, another p, or inf")
        guards = [self.guard(optimizer) for optimizer in listed(optimizers)]
        for guard in guards:
            if guard.in_block:
                raise UsageError(
                    f"gradients of {guard.name} cannot be clipped inside its scale_loss block, where they are scaled; "
                    "call clip_grad_norm_ after the with block"
                )
        if several_processes():
            # Before anything is agreed on.
            for optimizer, guard in zip(listed(optimizers), guards, strict=True):
                if guard.reduced is None:
                    self._meet_ranks(optimizer, guard)
        norms = [guard.agreed_norm(norm_type) for guard in guards]
        if not norms:
            return torch.zeros(())
        every = torch.stack([norm.to(norms[0].device) for norm in norms])
        norm = every.amax() if norm_type == torch.inf else every.sum() ** (1.0 / norm_type)
        for guard in guards:
            guard.clip(norm, max_norm)
        return norm

    def before_step(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """See to it that `_step` runs in place of a step that is about to begin: torch's hook before any step."""
        if torch.compiler.is_dynamo_compiling():
            return None
        if self.rehearsal is not None:
            raise self.rehearsal.step_reached()
        if self._inner_steps is None:
            self._inner_steps = InnerSteps(self._step)
        if self._inner_steps.reach(type(optimizer)):
            return None
        return self._guard_closure(optimizer, args, kwargs)

    def _step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step of any optimizer with casts off; through its guard, if the call went past that."""
        optimizer, given = args[0], args[1:]
        guard = self._guards.get(optimizer)
        if guard is None and not _is_guarded(optimizer):
            guard = self._guard_at_step(optimizer, given[0] if given else kwargs.get("closure"))
        if guard is None:
            result = self._casts.local.with_casts_off(step)(*args, **kwargs)
            if not _is_guarded(optimizer):
                self._plain_steps += 1
                self.tell_stepped(None)
            return result
        if guard.stepping:
            return step(*args, **kwargs)
        return guard.step(functools.partial(step, optimizer), given, kwargs)

    def _guard_at_step(self, optimizer: Any, closure: Any) -> StepGuard | None:
        """Return the guard that an optimizer without one gets as it steps; None where it goes on without.

        One that is called with a closure gets a guard now: when the closure scales the first loss, the step has begun
        already.
        """
        if self.on_unguarded is not None:
            self.on_unguarded(optimizer)
        guard = self._guards.get(optimizer)
        if guard is None and callable(closure):
            guard = self.guard(optimizer)
        if guard is None:
            if self._casts.dtype is torch.float16:
                self._vanishing.look(optimizer, stepped_params(optimizer))
            if optimizer not in self._unscaled:
                self._unscaled.add(optimizer)
                warn_of_unscaled_shards(type(optimizer).__name__, stepped_params(optimizer))
        return guard

    def end_steps(self) -> None:
        """Let torch's optimizers step as they are."""
        inner_steps, self._inner_steps = self._inner_steps, None
        if inner_steps is not None:
            inner_steps.restore()

    def _guard_closure(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Guard a closure where `_step` cannot stand around the step.

        Raises:
            UsageError: The step is to be skipped, which cannot be done here.
        """
        guard = self._guards.get(optimizer)
        blamed = guard.settle() if guard is not None and guard.pending else None
        if guard is not None and blamed is not None and not blamed.cleared:
            raise UsageError(
                f"this step of {guard.name} goes past optimizer.step, and its gradients overflowed; "
                "call optimizer.step(), not the class's function or a method bound before the first scale_loss"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure) or optimizer in self._guards or _is_guarded(optimizer):
            return None
        guard = self.guard(optimizer)
        self._last = guard.skips
        guarded = guard.guarded_closure(closure)
        return ((args[0], guarded, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": guarded})

    def keep_masters(self, optimizer: Any, originals: Mapping[int, Tensor] | None = None) -> MasterWeights:
        """Let an optimizer step fp32 masters of its half parameters from now on."""
        masters = self.masters_of(optimizer)
        if masters is None:
            refuse_own_scaler(optimizer)
            # First of all: what an earlier guard left scaled is in the gradients of the half parameters.
            self._drop_guard(optimizer)
            masters = MasterWeights(optimizer, originals)
            self._put_guard(optimizer, masters)
        else:
            masters.adopt(originals)
        return masters

    def hand_over(self, optimizer: Any) -> MasterWeights | None:
        """Let go of an optimizer and return its masters, which stay in place."""
        masters = self.masters_of(optimizer)
        self._drop_guard(optimizer)
        return masters

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
                masters.dissolve(params)
                if len(masters):
                    # It steps other models as well.
                    continue
                masters.dissolve()
            self._drop_guard(optimizer)
            if self.loss_scalers.forget_own(optimizer):
                vars(optimizer).pop("scale_loss", None)

    def _drop_guard(self, optimizer: Any) -> None:
        guard = self._guards.pop(optimizer, None)
        if guard is not None:
            guard.uninstall()

    def _is_served(self, but: weakref.ref[Any], tensor: Tensor) -> bool:
        """Tell whether the guard of another optimizer than ``but`` sees to the gradient of a tensor."""
        # The optimizers live as long as this list does, and their guards refer to them weakly.
        guarded = list(self._guards.items())
        guards = [guard for optimizer, guard in guarded if optimizer is not but()]
        return any(tensor is param for guard in guards for param in guard.params())

    def _scaled_now(self) -> dict[str, list[Tensor]]:
        """Return the parameters whose gradients are scaled now, by the name of their optimizer: those in a block."""
        found: dict[str, list[Tensor]] = {}
        for guard in self.guards if open_blocks.count else ():
            if guard.in_block and not (isinstance(guard.grads_scale, float) and guard.grads_scale == 1.0):
                halves = [] if guard.masters is None else [half for half, _ in guard.masters.pairs]
                found[guard.name] = [*found.get(guard.name, ()), *guard.params(), *halves]
        return found

    def masters_of(self, optimizer: Any) -> MasterWeights | None:
        """Return an optimizer's masters, None where it has none."""
        guard = self._guards.get(optimizer)
        return None if guard is None else guard.masters

    def collect(self, optimizer: Any) -> None:
        """Let the masters of an optimizer have the gradients of half parameters now, also within a block."""
        masters = self.masters_of(optimizer)
        if masters is not None:
            masters.share_gradients()

    def read_model(self) -> None:
        """Let all masters take over what is in their half parameters."""
        for guard in self.guards:
            if guard.masters is not None:
                guard.masters.read_model()

    def wrap(self, optimizer: Any, scalers: Sequence[LossScaler], check: Callable[[], None]) -> Any:
        """Give an optimizer a ``scale_loss`` with scalers of its own; see `autoamp.runtime.Handle.wrap_optimizer`.

        Args:
            optimizer: Wrapped for the first time, or again with other scalers.
            scalers: One for each loss. A scaler that serves another loss already is copied.
            check: Called before each ``scale_loss``; raises where there is nothing to scale.
        """
        self._check = check
        own = self.loss_scalers.give_own(optimizer, scalers, self.guard(optimizer).skips)
        reference = weakref.ref(optimizer)

        def scale_loss(loss: Tensor, *, delay_unscale: bool = False) -> contextlib.AbstractContextManager[Tensor]:
            self._check()
            return self.scaled(loss, reference(), own.next(), delay_unscale)

        optimizer.scale_loss = scale_loss
        return optimizer

    @property
    def device_type(self) -> str:
        """The device type that is cast."""
        return self._casts.device_type

    def without_casts(self) -> contextlib.AbstractContextManager[None]:
        """Turn this thread's casts off within a ``with`` statement."""
        return self._casts.switched(False)

    @property
    def has_masters(self) -> bool:
        """Whether an optimizer steps master weights, or will."""
        return self.masters_for_all or any(guard.masters is not None for guard in self.guards)

    def release(self) -> None:
        """Give every optimizer its step and its parameters back."""
        self.end_steps()
        # The optimizers live as long as this list does, and their guards refer to them weakly.
        guarded = list(self._guards.items())
        guards = [guard for _, guard in guarded]
        for guard in guards:
            guard.uninstall()
        self._guards.clear()
        for optimizer in self.loss_scalers.with_own():
            self.loss_scalers.forget_own(optimizer)
            vars(optimizer).pop("scale_loss", None)
        for guard in guards:
            if guard.masters is not None:
                guard.masters.dissolve()

    def note_own(self, skips: Skips, scaler: LossScaler) -> None:
        """Take note of an optimizer that scales its loss itself. Nobody waits for the device."""
        if self.rehearsal is not None:
            skips.steps -= 1
            raise self.rehearsal.step_reached()
        self.own = self.own or OwnSteps()
        self.own.scalers[skips] = scaler
        self._last = skips
        skips.watched = self
        if self.watch is not None:
            self.watch.step_begins()

    def note_loaded(self, optimizer: Any) -> None:
        """Take note that an optimizer's state was loaded; if it is scaled next without loss scales, that is warned of.

        Not once steps were taken: then the scale is that of this run, and no first value.
        """
        if not self._scales_loaded and not self.steps and getattr(optimizer, "state", None):
            self._resumed.add(optimizer)

    def scales_are_known(self) -> None:
        """Take note that loss scales were loaded, or that somebody was told that they were not."""
        self._scales_loaded = True
        self._resumed.clear()

    def warn_of_resumed(self, optimizers: Iterable[Any], scaler: LossScaler) -> None:
        """Warn where the next loss of a resumed training is scaled by a first value."""
        if not self._resumed or not scaler.checks:
            return
        if any(optimizer in self._resumed for optimizer in optimizers) and isinstance(scaler, DynamicLossScaler):
            warn_user(
                f"the optimizer's state was loaded, but no state of the loss scalers: the loss scale begins anew at "
                f"{scaler.loss_scale:g}, and the first steps may be skipped. Save autoamp.state_dict() in the "
                "checkpoint, and call autoamp.load_state_dict() when you resume"
            )
            self.scales_are_known()

    @property
    def scalers(self) -> list[LossScaler]:
        """The loss scalers, in the order of their entries in a checkpoint."""
        return self.loss_scalers.all

    @property
    def scales(self) -> bool:
        """Whether a scaler has a scale that moves, so that a resumed run has to know it."""
        return any(isinstance(scaler, DynamicLossScaler) for scaler in self.loss_scalers.all)

    def state_dict(self) -> dict[str, Any]:
        """Return the scalers' state and the number of skips; see `LossScalers.state_dict`."""
        return self.loss_scalers.state_dict(self.skipped_steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; all of it, or nothing.

        Raises:
            CheckpointError: A key is missing, unknown or of the wrong kind. The message names it.
        """
        skipped = self.loss_scalers.load_state_dict(state)
        self.scales_are_known()
        self._catch_up()
        self._skipped_steps = skipped
        for guard in self.guards:
            # The skips in a row were those of the run that is left behind.
            guard.skips.in_a_row = 0


def _is_guarded(optimizer: Any) -> bool:
    """Tell whether an optimizer has a guard that is none of ours: an `FP16_Optimizer`, or the one inside of it."""
    return isinstance(optimizer, ScalesItself) or isinstance(vars(optimizer).get("step"), AttachedStep)


def _not_an_optimizer(value: Any) -> str:
    name = "None" if value is None else f"a {type(value).__name__}"
    return f"{name} is no optimizer: it has no param_groups and step(); pass an optimizer, or a list or tuple of them"
