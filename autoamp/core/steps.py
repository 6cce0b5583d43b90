"""What became of a step: its losses, how many steps an optimizer took, which were skips, and warnings beside them.

Where the optimizer gets the flag of an overflow on its device, a step is counted before the host knows whether it was a
skip. Reading the number of skips waits for the device. By the losses that make its gradients a step that no loss scale
checks is judged too. Warned of are settings with which training would go on and silently go wrong, losses that nobody
scales, and buffers that a skipped step leaves with inf or nan.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, SupportsFloat, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core.attach import ScalesItself, living_optimizers_and_modules, stepped_params
from autoamp.core.casts import CastState
from autoamp.core.gradients import has_values, local_of
from autoamp.core.listeners import Listeners
from autoamp.core.loss_scale import LossScaler, UnreadFlags
from autoamp.core.ranks import RequestedGroup
from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES
from autoamp.torch_private import MODULES_OF_NORMS, disable_in_dynamo, has_modes, undisturbed

logger = logging.getLogger(__name__)

# Of an optimizer whose losses nobody scales these steps are looked at, each of which waits for the device.
_STEPS = frozenset({1, 10, 100, 1000})


def warn_without_gradients(name: str, params: Iterable[Tensor]) -> None:
    """Warn that no parameter of the optimizer of this name has a gradient after its block, and say why."""
    if any(param.requires_grad for param in params):
        cause = (
            "was scaled_loss.backward() not called in the block, or does the optimizer hold other parameters than the "
            "model that made the loss (it was built for a copy, or before the model was replaced or sharded)?"
        )
    else:
        cause = "all of them are frozen (requires_grad=False)"
    warn_user(f"no parameter of {name} has a gradient after scale_loss: {cause}")


def check_optimizer(optimizer: Any) -> None:
    """Warn of an ``eps`` that is 0 in the parameters' half dtype.

    Only for optimizers that step half parameters themselves: fp32 masters have no such problem, and for arithmetic in
    fp32 eps is not 0.
    """
    if getattr(optimizer, "master_weights", False) or getattr(optimizer, "computes_in_fp32", False):
        return
    for index, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        for dtype in HALF_DTYPES if isinstance(eps, float) and eps > 0 else ():
            is_zero = not torch.tensor(eps, dtype=dtype, device="cpu")
            if is_zero and any(param.dtype is dtype for param in group["params"]):
                info = torch.finfo(dtype)
                # Subnormal numbers included: 2**-24 in fp16 and 2**-133 in bf16.
                smallest = info.smallest_normal * info.eps
                warn_user(
                    f"{type(optimizer).__name__}.param_groups[{index}]: eps={eps:g} is 0 in {dtype}, so a division by "
                    f"it gives inf; the smallest that survives is {smallest:.3g}. Set eps to that or "
                    "more, or step fp32 master weights (opt_level='O2')"
                )


class UnderflowWatch:
    """Warns once of fp16 gradients that vanish, as nobody scales the loss. For optimizers without a loss scale."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._said = False

    def look(self, optimizer: Any, params: Iterable[Tensor]) -> None:
        """Look at the gradients that an optimizer is about to step by, at some of its steps."""
        if self._said:
            return
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if step not in _STEPS:
            return
        found = _share_that_vanishes(params)
        if found is not None:
            self._said = True
            name = type(optimizer).__name__
            warn_user(
                f"{found:.0%} of {name}'s gradients underflow in fp16 (0, or below "
                f"{torch.finfo(torch.float16).tiny:.2g}), and the loss is not scaled. Scale it with "
                "`with handle.scale_loss(loss, optimizer) as scaled_loss`, call handle.auto_scale(), or use bf16"
            )


def _share_that_vanishes(params: Iterable[Tensor]) -> float | None:
    """Return the part of all gradients that fp16 does not hold in full, where it is most of those that are not 0."""
    least = torch.finfo(torch.float16).tiny
    grads = [param.grad for param in params if param.grad is not None]
    dense = [grad.detach() for grad in grads if grad.layout is torch.strided and grad.is_floating_point()]
    if not dense or not all(map(has_values, dense)):
        return None
    held = torch.stack([(~(grad.abs() < least)).sum().cpu() for grad in dense]).sum().item()
    some = torch.stack([(grad != 0).sum().cpu() for grad in dense]).sum().item()
    every = sum(grad.numel() for grad in dense)
    return None if held * 2 >= some > 0 or not every else 1 - held / every


class SkipCount:
    """Counts skips, and tells once of buffers, such as running statistics, in which their batch has left inf or nan.

    A skipped step leaves parameters as they were. Buffers were written in the forward pass, before anybody knew.

    Attributes:
        number: How many there were.
    """

    def __init__(self) -> None:
        self.number, self._said = 0, False

    @disable_in_dynamo
    def add(self) -> None:
        """Count a skip, and look at the buffers of all modules that live and train. Waits for the device."""
        self.number += 1
        if self._said:
            return
        _, modules = living_optimizers_and_modules()
        found = {module: names for module in modules if (names := _nonfinite_buffers(module))}
        if not found:
            return
        self._said = True
        paths = _paths(modules, found)
        shown = [f"{paths[module]}.{name}" for module, names in found.items() for name in names]
        more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
        logger.warning(
            "a skipped step has left inf or nan in buffers: %s%s. A skip keeps parameters as they were, but forward "
            "has written these buffers, and model.eval() gives inf or nan by them. Call reset_running_stats() on "
            "norms and set other buffers anew, or load an earlier checkpoint. If the batch is finite in fp32, run the "
            "layers before them in fp32, by a path under [modules] of a list or by handle.override(module, 'fp32')",
            ", ".join(shown[:4]), more,
        )  # fmt: skip


def _nonfinite_buffers(module: Module) -> list[str]:
    """Return the names of a module's own buffers in which a forward pass has left inf or nan, as far as one can tell.

    A buffer of another module than a norm may be made with inf, as a mask of attention is, so nan alone counts there.
    """
    found: list[str] = []
    # A module that is half built answers nothing, and a lazy one has no values.
    with contextlib.suppress(Exception):
        for name, buffer in module.named_buffers(recurse=False) if module.training else ():
            if buffer.is_floating_point():
                is_statistic = isinstance(module, MODULES_OF_NORMS) or name.startswith("running_")
                is_bad = ~buffer.isfinite() if is_statistic else buffer.isnan()
                found += [name] if bool(is_bad.any()) else []
    return found


def _paths(modules: Iterable[Module], wanted: Iterable[Module]) -> dict[Module, str]:
    """Return the path of each wanted module from the outermost one that has it."""
    paths = {module: type(module).__name__ for module in wanted}
    for outer in modules:
        with contextlib.suppress(Exception):
            for name, module in outer.named_modules():
                whole = f"{type(outer).__name__}.{name}"
                if name and module in paths and whole.count(".") > paths[module].count("."):
                    paths[module] = whole
    return paths


_MAX_LOSSES = 256


class Steps:
    """The steps of all optimizers of a handle together: how many, the last one, and the losses since.

    Args:
        listeners: Hear of losses, of the call of an optimizer, and of the end of a step.
        catch_up: Lets the handle's loss scalers hear of steps of which only the device knows whether they were skips.

    Attributes:
        guarded: How many there were of guarded optimizers, skips and those of `FP16_Optimizer` included.
        plain: How many of optimizers without a guard.
        skips: How many of them were skipped, as far as the host knows.
        last: The last step of any optimizer.
        own: The loss scalers of the program's own `FP16_Optimizer`, the newest last.
        own_scale: The scale of the program's own `torch.amp.GradScaler`; None where it has none.
        waiting: The number of losses that were scaled and whose backward pass has not begun.
        refuses: Tells of an optimizer and its guard, or None, whether a step by unchecked gradients is to be skipped.
        after: Called when a step was taken or skipped, until it returns True.
        reads_flags: Whether the host is to learn at once what becomes of the step.
    """

    def __init__(self, listeners: Listeners, catch_up: Callable[[], None] = lambda: None) -> None:
        self.guarded = self.plain = self.waiting = 0
        self.last = Step()
        self.own: list[LossScaler] = []
        self.own_scale: SupportsFloat | None = None
        self.reads_flags = False
        self.refuses: Callable[[Any, Any], bool] = lambda optimizer, guard: False
        self.after: Callable[[], bool] | None = None
        self.skips = SkipCount()
        self._listeners, self._catch_up = listeners, catch_up
        # The losses of one element since the last step, the first 256, without their graph: each with its thread, and
        # whether a loss scale multiplies it. Other optimizers may step by the same ones until the next one comes.
        self._losses: list[tuple[int, Tensor, bool]] = []
        self._ended = False

    @property
    def all(self) -> int:
        """How many there were, skips included."""
        return self.guarded + self.plain

    @property
    def skipped(self) -> int:
        """How many were skipped. Waits for the device where only that knows."""
        self._catch_up()
        for scaler in self.own:
            scaler.unread.catch_up()
        return self.skips.number

    def loss_scale(self, ours: float) -> float:
        """Return the scale that losses have: that of the program's own scaler, if it has one, else ours."""
        if self.own:
            return self.own[-1].loss_scale
        return ours if self.own_scale is None else float(self.own_scale)

    def add_own(self, scaler: LossScaler) -> None:
        """Take note of the scaler of an `FP16_Optimizer`."""
        if scaler not in self.own:
            self.own.append(scaler)

    def note(self, loss: Tensor, scale: SupportsFloat, *, waits: bool = False) -> None:
        """Take note of a loss before its backward pass.

        Args:
            loss: The loss before it is multiplied.
            scale: The scale, which may be known to the device alone; 1.0 for a loss that nobody scales.
            waits: Whether it is a scaled loss whose backward pass is yet to begin.
        """
        if self._ended:
            self._losses, self.waiting, self._ended = [], 0, False
        self.waiting += waits
        if loss.numel() == 1 and len(self._losses) < _MAX_LOSSES:
            with undisturbed() if has_modes() else contextlib.nullcontext():
                value = loss.detach()
                if type(value) is Tensor and value.layout is torch.strided:
                    # Not all of a larger tensor, which it would keep.
                    value = value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
            self._losses.append((threading.get_ident(), value, type(scale) is not float or scale != 1.0))
        for scaled in self._listeners.loss_scaled:
            scaled(loss, scale)

    @property
    def losses(self) -> list[Tensor]:
        """The losses of this thread since the last step, or all, where it has none: another one ran the passes."""
        return [value for value, _ in self._own_losses()]

    @property
    def unscaled(self) -> list[Tensor]:
        """Those that no loss scale multiplies."""
        return [value for value, is_scaled in self._own_losses() if not is_scaled]

    def _own_losses(self) -> list[tuple[Tensor, bool]]:
        thread = threading.get_ident()
        own = [(value, is_scaled) for one, value, is_scaled in self._losses if one == thread]
        return own or [(value, is_scaled) for _, value, is_scaled in self._losses]

    def begin(self, step: Step, *, guarded: bool = True) -> None:
        """Take note that an optimizer is called.

        Args:
            step: The step, which is counted here if the optimizer has a guard.
            guarded: Whether it has one. Without one the step counts once it was taken.
        """
        self._ended, self.reads_flags = True, False
        # One that refuses the step raises: it does not count.
        for begun in self._listeners.step_begun:
            self.reads_flags |= begun()
        self.last = step
        self.guarded += guarded

    def end(self, step: Step) -> None:
        """Take note that a step was taken or skipped, as it tells."""
        if self.after is not None and self.after():
            self.after = None
        for ended in self._listeners.step_ended:
            ended(step)

    def reset(self, steps: int = 0, skipped: int = 0) -> None:
        """Count steps of guarded optimizers and skips from these numbers on."""
        self._catch_up()
        self.guarded, self.skips.number = steps, skipped

    @property
    def loss_is_nonfinite(self) -> bool:
        """Whether a loss since the last step itself held inf or nan. Waits for the device."""
        with undisturbed():
            return any(not bool(local_of(loss).isfinite().all()) for loss in self.losses)


# The class of the guards, which a file above this one has.
Guard = TypeVar("Guard")


class GuardHost(Generic[Guard]):
    """What the guard of an optimizer asks and tells. This one knows of no handle, and does nothing."""

    listeners = Listeners()
    """What looks on."""

    casts: CastState | None = None
    """What casts for the program: off while the optimizer steps, and on in a closure."""

    undoes_steps = False
    """Whether a step that meets inf or nan in a later evaluation of its closure is undone."""

    max_consecutive_skips = 50
    """So many skips of one optimizer in a row are an error."""

    def __init__(self) -> None:
        self.steps = Steps(self.listeners)
        # By the id of the optimizer: the thread, and the optimizer.
        self.running: dict[int, tuple[int, Any]] = {}

    @property
    def scalers(self) -> Sequence[LossScaler]:
        """All loss scalers, in the same order on all ranks."""
        return ()

    def requested_group(self, optimizer: Any) -> RequestedGroup | None:
        """Return the process group over which the program wants steps to be agreed on, if it asked for one."""
        return None

    def refuse_scaled(self, guard: Guard) -> None:
        """Raise UsageError if gradients of the optimizer are scaled still, by a block that did not name it."""

    def steps_within(self, optimizer: Any) -> bool:
        """Whether this thread is within the step of another optimizer with these parameters, a wrapper such as LARC.

        Not of an `FP16_Optimizer`: there the step within it is the one that counts.
        """
        thread, params = threading.get_ident(), set(map(id, stepped_params(optimizer)))
        return any(
            ident == thread and not isinstance(other, ScalesItself) and params.issubset(map(id, stepped_params(other)))
            for ident, other in list(self.running.values())
            if other is not optimizer
        )

    def step_begins(self, guard: Guard, *, counts: bool) -> None:
        """Called at each step, before it is taken or skipped.

        Args:
            guard: The optimizer's.
            counts: Whether the step counts: one within the step of a wrapper does not.
        """


class Step:
    """The record of one call of ``optimizer.step()``, of any optimizer, until its next one.

    Attributes:
        skipped_by: What skipped it, as far as the host knows: a loss scaler, whose gradients overflowed, or the name of
            a rule. None for a step that was taken, or that still runs.
        scale: The loss scale of a skip; nan where it is not known.
        is_late: Whether others may have been taken before the host knew what became of it.
        explanation: What explains a skip; None if diagnostics did not record it.
        unread: Tells of this step or of those before it, if a guard left the flag of an overflow on the device.
        flag: Not 0 for a skip, if the program's own scaler left it to the optimizer.
    """

    __slots__ = ("explanation", "flag", "is_late", "scale", "skipped_by", "unread")

    def __init__(self) -> None:
        self.skipped_by: LossScaler | str | None = None
        self.scale = 1.0
        self.is_late = False
        self.explanation: Any = None
        self.unread: UnreadFlags | None = None
        self.flag: Tensor | None = None

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped; False while it runs. Waits for the device where that alone knows."""
        if self.unread is not None:
            self.unread.catch_up()
        if self.skipped_by is None and self.flag is not None:
            self.skipped_by = "torch.amp.GradScaler" if self.flag else None
            self.flag = None
        return self.skipped_by is not None


class StepHistory:
    """How many steps one optimizer took, and which were skips. Reading them waits for flags on the device.

    It refers to nothing of the optimizer, so that flags that are still on their way keep no weights alive.

    Args:
        name: Of the optimizer, for the log.
        owner: Returns what hears of each skip.

    Attributes:
        steps: How many times ``step()`` was called, skips included.
        total: How many of these are known to be skips.
        in_a_row: How many are known to be skips since the last step that is known to be taken.
        step: The last of these calls.
        name: As given.
        owner: As given.
    """

    def __init__(self, name: str, owner: Callable[[], GuardHost[Any]]) -> None:
        self.steps = self.total = self.in_a_row = 0
        self.step = Step()
        self.owner = owner
        self.name = name

    def begin(self) -> Step:
        """Begin the record of another step."""
        self.steps += 1
        before, self.step = self.step, Step()
        self.step.unread = before.unread
        return self.step

    def catch_up(self) -> None:
        """Learn what became of the last steps where that is on the device still; waits for it."""
        if self.step.unread is not None:
            self.step.unread.catch_up()

    def end(self, step: Step, skipped_by: LossScaler | None = None, scale: float = 1.0, *, late: bool = False) -> None:
        """Count a step, and tell those who are to hear of it.

        Args:
            step: The last one, or with ``late`` one before.
            skipped_by: The scaler of a skip; None for a step that was taken.
            scale: The one that was too high.
            late: Whether others may have been taken since.
        """
        self.catch_up()
        step.unread, step.is_late = None, late
        owner = self.owner()
        if skipped_by is None:
            self.in_a_row = 0
            for taken in owner.listeners.step_taken:
                taken(self, step)
            return
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        step.skipped_by, step.scale = skipped_by, scale
        owner.steps.skips.add()
        for skipped in owner.listeners.step_skipped:
            step.explanation = skipped(self, step) or step.explanation
        if self.total & (self.total - 1) == 0:
            logger.warning(
                "%s: step skipped, gradients overflowed at loss scale %g, the next is %g (skipped %d, in a row %d)",
                self.name, scale, skipped_by.loss_scale, self.total, self.in_a_row,
            )  # fmt: skip
