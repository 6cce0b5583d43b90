"""The `scale_loss` block: gradients are scaled on entry, unscaled and checked on exit.

`ScaledBlock` is the part of ``scale_loss`` that handles gradients. What it found in them goes to the guards of the
optimizers as an `OverflowCheck`. A block unscales the gradients of its own optimizers. Gradients of other parameters
that the same loss reaches stay multiplied by the scale, and so do all gradients of a pass that begins after its block
has ended: `StillScaled` knows these, and refuses their use.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.core.attach import guard_before, living_optimizers_and_modules, stepped_params
from autoamp.core.gradients import (
    is_same_gradient,
    mark_of,
    scale_,
    several_processes,
    total_norm,
    unscale_,
    version_of,
    versions_of,
)
from autoamp.core.guard import OverflowCheck, StepGuard
from autoamp.core.loss_scale import LossScaler, Scale, is_same_scale, scale_ratio
from autoamp.core.steps import warn_without_gradients
from autoamp.errors import UsageError
from autoamp.torch_private import at_end_of_pass, engine_reaches, start_no_graph

_GRAD = operator.attrgetter("grad")


class StillScaled:
    """Parameters whose gradients a backward pass left scaled, as long as nobody wrote to these gradients.

    Args:
        guards: Returns the guards of a handle.

    Attributes:
        threads: Those that have had blocks.
    """

    def __init__(self, guards: Callable[[], Iterable[StepGuard]]) -> None:
        self._noted: Any = WeakIdKeyDictionary()
        self._guards = guards
        # All optimizers of torch's class; None until a backward pass of a scaled loss asks for them.
        self._living: weakref.WeakSet[Any] | None = None
        # The parameters that none of them had by then: one that is made later may step them.
        self._in_no_optimizer: list[weakref.ref[Tensor]] = []
        self.threads: set[int] = set()

    @property
    def any_noted(self) -> bool:
        """Whether any parameter is noted."""
        # Dynamo does not trace `WeakIdKeyDictionary.__len__`, which takes longer, too.
        return bool(self._noted.data)

    def params(self) -> list[Tensor]:
        """Return all parameters of which a note was taken."""
        return [param for reference in list(self._noted.data) if (param := reference()) is not None]

    def note(self, params: Iterable[Tensor], scale: Scale, reason: str) -> None:
        """Take note of what a pass left scaled.

        Args:
            params: The parameters.
            scale: Of the loss.
            reason: How that came, and what mends it.
        """
        for param in params:
            if param.grad is not None:
                self._noted[param] = mark_of(param.grad), scale, reason

    def note_written(self, params: Sequence[Tensor], own: Sequence[StepGuard], scale: Scale, reason: str) -> None:
        """Take note of those parameters whose gradients the pass that calls is going to write, at its end.

        Not of those that one of the guards has as well. What a checkpoint with ``use_reentrant=True`` reaches is not in
        the graph of the pass. Where several threads have blocks, another one may write meanwhile: there those alone
        count that the graph reaches.
        """
        alone = len(self.threads) < 2
        params = params if alone else [param for param in params if engine_reaches(param)]
        if not params:
            return
        # By sweeps that hundreds of parameters do not slow: most passes write to none of them.
        grads = list(map(_GRAD, params))
        present = [grad for grad in grads if grad is not None]
        versions = versions_of(present)

        def note() -> None:
            if alone and len(self.threads) > 1:
                return
            if all(map(operator.is_, map(_GRAD, params), grads)) and versions_of(present) == versions:
                return
            # What the program writes to them later, within the block or after it, counts.
            before = dict(zip(map(id, present), versions, strict=True))
            pairs = zip(params, grads, strict=True)
            written = [
                param
                for param, grad in pairs
                if param.grad is not grad or (grad is not None and version_of(grad) != before[id(grad)])
            ]
            self.note(_without(written, own), scale, reason)

        # What reduces gradients over ranks writes them at the end of the pass too, and asked for that later.
        at_end_of_pass((lambda: at_end_of_pass(note)) if several_processes() else note)

    def forget(self, params: Iterable[Tensor]) -> None:
        """Take note that the gradients of these parameters are unscaled, which torch counts as no write."""
        for param in params:
            self._noted.pop(param, None)

    def left(self, params: Iterable[Tensor]) -> list[tuple[Tensor, Scale, str]]:
        """Return those of these parameters that are noted and whose gradients are the same still, with their notes."""
        found: list[tuple[Tensor, Scale, str]] = []
        for param in params if self.any_noted else ():
            noted = self._noted.get(param)
            if noted is not None:
                mark, scale, reason = noted
                if param.grad is not None and is_same_gradient(mark, param.grad):
                    found.append((param, scale, reason))
                else:
                    # What was written to, or replaced, is the program's from now on.
                    del self._noted[param]
        return found

    def refuse(self, action: str, params: Iterable[Tensor]) -> None:
        """Raise UsageError if an action is about to use gradients that are scaled still. Waits for the device then.

        Args:
            action: What it is, and does.
            params: The parameters of these gradients, with the half parameters of masters.
        """
        left = self.left(params)
        # Torch counts no writes through `.data`, by which some programs set gradients to 0.
        if left and total_norm([param.grad for param, *_ in left if param.grad is not None], math.inf) != 0:
            param, scale, reason = left[0]
            if not self._steps_any_of([one for one, *_ in left]):
                reason = (
                    "they are of this loss, and no optimizer steps them. Call requires_grad_(False) on what is not "
                    "trained, or use the parameters of the optimizer alone"
                )
            # A half parameter and its master have one.
            count = len({id(param.grad) for param, *_ in left})
            raise UsageError(
                f"{action} gradients that are multiplied by the loss scale {float(scale):g}, those of {count} "
                f"parameters, the first of shape {tuple(param.shape)}: {reason}"
            )

    def _steps_any_of(self, params: Iterable[Tensor]) -> bool:
        """Whether an optimizer steps one of these parameters."""
        theirs = [guard.grads.leaves() for guard in self._guards()]
        for optimizer in self._living_optimizers():
            guard = guard_before(optimizer)
            theirs.append(stepped_params(optimizer) if guard is None else guard.grads.leaves())
        stepped = {id(param) for some in theirs for param in some}
        return any(id(param) in stepped for param in params)

    def _living_optimizers(self) -> list[Any]:
        living: Any = self._living
        # Copied by one call, as another thread may make an optimizer meanwhile.
        return [] if living is None else [one for reference in list(living.data) if (one := reference()) is not None]

    def optimizer_made(self, optimizer: Any) -> None:
        """Take note of an optimizer of torch's class."""
        if self._living is not None:
            self._living.add(optimizer)

    def others(self, guards: Sequence[StepGuard], scale: Scale) -> tuple[list[Tensor], Sequence[StepGuard]]:
        """Return the leaves of all other optimizers whose gradients have another scale, and of no optimizer.

        Args:
            guards: Those of a block.
            scale: Of the block.

        Returns:
            The leaves, some of which may come twice; and the guards with this scale, whose leaves may be among them.
        """
        if self._living is None:
            self._find_living()
        theirs: dict[Any, None] = dict.fromkeys(self._guards())
        in_none = [param for reference in self._in_no_optimizer if (param := reference()) is not None]
        # To a frozen one, as of a teacher, no pass writes.
        others = [param for param in in_none if param.requires_grad]
        for optimizer in self._living_optimizers():
            if (guard := guard_before(optimizer)) is None:
                others += stepped_params(optimizer)
            else:
                # That of an `FP16_Optimizer` is none of the handle's.
                theirs[guard] = None
        apart = [one for one in theirs if one not in guards and not is_same_scale(one.grads.scale, scale)]
        for guard in apart:
            others += guard.grads.leaves()
        return others, [guard for guard in theirs if guard not in apart]

    def _find_living(self) -> None:
        """Find all optimizers of torch's class, and the parameters of modules that none of them steps."""
        optimizers, modules = living_optimizers_and_modules()
        self._living = weakref.WeakSet(optimizers)
        held = {id(param) for guard in self._guards() for param in guard.grads.leaves()}
        for optimizer in optimizers:
            guard = guard_before(optimizer)
            held.update(map(id, stepped_params(optimizer) if guard is None else guard.grads.leaves()))
        # A module that is half built has no parameters.
        found = (param for module in modules for param in vars(module).get("_parameters", {}).values())
        self._in_no_optimizer = [weakref.ref(one) for one in found if one is not None and id(one) not in held]


def _without(params: Iterable[Tensor], guards: Iterable[StepGuard]) -> list[Tensor]:
    """Return the parameters that no guard has as well, each once."""
    left_out = {id(leaf) for guard in guards for leaf in guard.grads.leaves()}
    return list({id(param): param for param in params if id(param) not in left_out}.values())


class _Count:
    """A plain object: what compiled code sets on a `threading.local` itself, no guard of Dynamo sees."""

    number = 0


class _OpenBlocks(threading.local):
    """The blocks of a thread in which the program scales its loss."""

    def __init__(self) -> None:
        self.open = _Count()

    @property
    def count(self) -> int:
        """How many are open."""
        return self.open.number


open_blocks = _OpenBlocks()


class NeedsWith:
    """Answers the reading of an attribute of what ``scale_loss`` returns: ``scale_loss(...).backward()``."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"scale_loss() returns a context manager, which has no {name!r}; write `with handle.scale_loss(loss, "
            "optimizer) as scaled_loss: scaled_loss.backward()`",
            name=name,
            obj=self,
        )


class UnscaledBlock(NeedsWith, contextlib.nullcontext[Any]):
    """What ``scale_loss`` returns where nothing is scaled."""


class ScaledBlock:
    """A block in which the gradients of some optimizers are those of a scaled loss. A context manager.

    Inside, everything in ``.grad`` has the scale of the block: gradients of earlier blocks are multiplied by it first.
    After it they have true values again, also after an exception. A scaler that does not check (scale 1.0) costs no
    pass over the gradients. The ``with`` statement yields the scale: multiply the loss by it, and call `watch`. Its
    beginning raises UsageError where one of the optimizers is in a block already.

    Args:
        guards: Of the optimizers whose gradients the loss makes; none where only the gradients of inputs are wanted.
        scaler: Gives the scale, and is told later what became of it.
        delay_unscale: Leave the gradients scaled, for a later block or the step to unscale and check.
    """

    scale: Scale
    _still_scaled: StillScaled

    def __init__(self, guards: Iterable[StepGuard], scaler: LossScaler, *, delay_unscale: bool = False) -> None:
        self._guards = tuple(dict.fromkeys(guards))
        self._scaler, self._delay_unscale = scaler, delay_unscale
        self._block = ", ".join(guard.name for guard in self._guards) or "no optimizer"
        # The scaled loss may outlive its block, and this object with it, by much.
        self._references: Sequence[weakref.ref[StepGuard]] = ()
        self._hook: Any = None
        self._checks = self._has_ended = self._loss_passed = self._backward_seen = False

    def __enter__(self) -> Scale:
        guards, scaler = self._guards, self._scaler
        for guard in guards:
            if guard.in_block:
                raise UsageError(f"{guard.name} is in a scale_loss block already; end that block before the next")
        unscaled: set[int] = set()
        for guard in guards:
            guard.grads.collect(new_pass=True)
            guard.grads.resolve_dropped_grads()
            # What a block of the same scaler left scaled is brought to the scale of this one. An overflow in what a
            # block of another scaler left is that scaler's, so it is checked before this block adds to it.
            if guard.grads.delayed is not scaler or not scaler.checks or not guard.grads.has_any():
                guard.grads.finish_delayed(unscaled)
        # Read after the loop, in which checks were resolved: that may have changed it. Both are asked for once: the
        # program may set the scale within the block.
        self._checks, self.scale = scaler.checks, scaler.scale_without_sync()
        seen: set[int] = set()
        for guard in guards:
            # A parameter of several optimizers is brought to the scale once.
            if len(guards) > 1 or not is_same_scale(guard.grads.scale, self.scale):
                params = [param for param in guard.grads.params() if param.grad is not None and id(param) not in seen]
                seen.update(map(id, params))
                if params and not is_same_scale(guard.grads.scale, self.scale):
                    scale_(params, scale_ratio(self.scale, guard.grads.scale))
            guard.grads.scale = self.scale
        for guard in guards:
            if guard.masters is not None:
                guard.masters.prepare_reducer()
        open_blocks.open.number += 1
        for guard in guards:
            guard.in_block = True
        return self.scale

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Unscale and check. UsageError: the loss was run backward and not the scaled one, in any block so far."""
        guards, is_wrong = self._guards, kind is None and self._loss_passed and not self._backward_seen
        self._has_ended, self._guards, self._references = True, (), list(map(weakref.ref, guards))
        if self._hook is not None:
            self._hook.remove()
        try:
            if kind is not None or is_wrong:
                # The program may catch the exception and step all the same: not with inf and nan.
                self._unscale(guards, warns=False)
            elif self._delay_unscale:
                for guard in guards:
                    guard.grads.collect()
                    guard.grads.scale, guard.grads.delayed = self.scale, self._scaler if self._checks else None
            else:
                self._unscale(guards, warns=True)
        finally:
            open_blocks.open.number -= 1
            for guard in guards:
                guard.in_block = False
                guard.backward_seen |= kind is None and self._backward_seen
        if is_wrong:
            raise UsageError(
                f"loss.backward() was called inside the scale_loss block of {self._block}, and its gradients are "
                "not scaled. "
                "Call scaled_loss.backward(), where scaled_loss is the value that the with statement yields"
            )

    def _unscale(self, guards: Sequence[StepGuard], *, warns: bool) -> None:
        """Unscale and check the gradients of all guards. Nothing waits for the device.

        The check concerns every optimizer that has gradients: none of them may step by a loss that overflowed for
        another.
        """
        for guard in guards:
            guard.grads.collect()
        check = None
        if self._checks:
            check = OverflowCheck(self._scaler, self.scale, _unscaled(guards, self._scaler, self.scale))
        without: list[StepGuard] = []
        for guard in guards:
            # Ranks of a group reduce the flags of all: one without gradients takes part.
            is_concerned = guard.grads.has_any() or guard.grads.group is not None
            guard.grads.scale, guard.grads.delayed = 1.0, None
            if check is not None:
                guard.grads.block_ended(check, is_concerned=is_concerned)
            without += [] if is_concerned else [guard]
        for guard in without if warns else ():
            warn_without_gradients(guard.name, guard.grads.params())

    # -- backward passes --

    def watch(self, loss: Tensor, scaled: Tensor, still_scaled: StillScaled) -> None:
        """See which backward passes the scaled loss begins, and refuse one that begins after the block has ended.

        `torch.autograd.grad` of the scaled loss is no such pass: it writes no gradient of a parameter.

        Args:
            loss: The program's.
            scaled: Made of it.
            still_scaled: Takes note of the parameters whose gradients a pass leaves scaled.
        """
        self._still_scaled = still_scaled
        still_scaled.threads.add(threading.get_ident())
        # Of the scaled loss, in this block or in an earlier one of these optimizers that ended without an error.
        self._backward_seen = all(guard.backward_seen for guard in self._guards)
        if loss.requires_grad and scaled is not loss:
            if not self._backward_seen:
                self._hook = loss.register_hook(self._loss_passes)
            scaled.register_hook(self._scaled_passes)

    def _loss_passes(self, _: Tensor) -> None:
        self._loss_passed = True

    def _scaled_passes(self, _: Tensor) -> None:
        self._backward_seen, still_scaled = True, self._still_scaled
        if self._has_ended:
            self._passes_late()
            return
        others, own = still_scaled.others(self._guards, self.scale)
        if still_scaled.any_noted:
            leaves = (param for guard in self._guards for param in guard.grads.leaves())
            reached = [param for param, *_ in still_scaled.left(leaves) if engine_reaches(param)]
            still_scaled.refuse("scaled_loss.backward() would add to", reached)
        if others:
            reason = (
                f"the scale_loss block that made them was given {self._block} alone. Pass all optimizers of the loss, "
                "as in scale_loss(loss, [first, second]), or clear these gradients before the next backward pass"
            )
            still_scaled.note_written(others, own, self.scale, reason)

    def _passes_late(self) -> None:
        """Refuse a pass that begins after the block has ended, where it would leave gradients scaled."""
        guards = [guard for reference in self._references if (guard := reference()) is not None]
        others, own = self._still_scaled.others(guards, self.scale)
        others = _without(others, own)
        # Gradients that delay_unscale left scaled, or those of another open block, may have the same scale.
        for guard in guards:
            others += [] if is_same_scale(guard.grads.scale, self.scale) else guard.grads.leaves()
        reason = (
            f"scaled_loss.backward() was called after its scale_loss block of {self._block} had ended. Indent it into "
            "the with block"
        )
        if any(map(engine_reaches, others)):
            raise UsageError(f"Gradients would stay multiplied by the loss scale {float(self.scale):g}: {reason}")
        self._still_scaled.note_written(others, (), self.scale, reason)


# The hook runs in the backward pass of a compiled step too, and Dynamo of torch 2.13 calls weak references wrongly.
start_no_graph(ScaledBlock._scaled_passes)


def _unscaled(guards: Sequence[StepGuard], scaler: LossScaler, scale: Scale) -> list[Tensor]:
    """Unscale the gradients of all guards, and return flags of what this block made inf or nan.

    An overflow of an earlier block stays in the gradients of its optimizer. It says nothing of this loss, so an
    optimizer whose earlier check tells of one has no part in the flags.
    """
    params = [param for guard in guards for param in guard.grads.params()]
    waiting = [guard for guard in guards if guard.grads.checks] if len(guards) > 1 else []
    if not waiting:
        return unscale_(params, scale, scaler.unread.blank)
    params = [param for param in params if param.grad is not None]
    # Inf in a gradient that several of them step by concerns those without an earlier check too.
    count = Counter(id(param.grad) for param in params)
    flags: list[Tensor] = []
    for guard in waiting:
        own = [param for param in guard.grads.params() if count[id(param.grad)] == 1]
        flags += _without_earlier(guard.grads.checks, unscale_(own, scale, scaler.unread.blank))
        unscaled = {id(param.grad) for param in own}
        params = [param for param in params if id(param.grad) not in unscaled]
    return [*flags, *unscale_(params, scale, scaler.unread.blank)]


def _without_earlier(checks: Sequence[OverflowCheck], flags: Sequence[Tensor]) -> Sequence[Tensor]:
    """Clear flags if a check of an earlier block tells of an overflow. Waits for nothing."""
    if any(check.overflowed for check in checks):
        return ()
    for flag in flags:
        for earlier in (one for check in checks for one in check.found):
            flag.mul_(earlier.to(flag.device, non_blocking=True) == 0)
    return flags
