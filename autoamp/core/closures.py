"""Steps that evaluate the loss themselves, by a closure: again at a lower scale where it overflows, or undone."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoamp.core.attach import stepped_params
from autoamp.core.gradients import several_processes, version_of
from autoamp.core.loss_scale import LossScaler
from autoamp.errors import NonFiniteGradientsError
from autoamp.tensors import map_tensors

if TYPE_CHECKING:
    from autoamp.core.guard import OverflowCheck, StepGuard

# So many halvings lead from the highest default scale, 2**24, far below 1, where no scale is to blame any more.
_MAX_EVALUATIONS = 33


class _TrainingFailed(BaseException):
    """Leaves an optimizer's step from within its closure, with the loss and the check to blame, if one is."""


def step_with_closure(
    guard: StepGuard,
    closure: Callable[[], Any],
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step an optimizer that evaluates the loss itself. Returns what the step returns.

    Raises:
        NonFiniteGradientsError: Gradients overflow at all scales with the parameters moved, and such a step is not
            undone.
    """
    guard.grads.resolve_dropped_grads()
    blamed = guard.grads.resolve()
    if blamed is not None:
        guard.skip(blamed)
        return None if guard.repeats_closure else _call_closure(guard, closure)
    guard.begin_masters()
    undo = StepCopy(guard.optimizer) if guard.owner().undoes_steps else None
    versions, begun = [version_of(param) for param in guard.grads.params()], False

    def evaluate() -> Any:
        nonlocal begun
        first, begun = not begun and versions == [version_of(param) for param in guard.grads.params()], True
        guard.params_changed()
        loss, blamed = _evaluate(guard, closure, 1 if first and not guard.repeats_closure else _MAX_EVALUATIONS)
        if blamed is None and not guard.is_refused():
            return loss
        if first or undo is not None or blamed is None:
            raise _TrainingFailed(loss, blamed)
        raise NonFiniteGradientsError(
            f"gradients overflowed at loss scale {float(blamed.scale):g} when {guard.name} called its closure in the "
            "middle of a step, and no lower scale is allowed or helps. The parameters are at an intermediate point: "
            "load the last checkpoint, and lower the learning rate, or min_loss_scale if that is the limit, or train "
            "in bf16 or fp32"
        )

    known = state_size(guard.optimizer)
    try:
        if args:
            return guard.take(original, (evaluate, *args[1:]), kwargs)
        return guard.take(original, (), {**kwargs, "closure": evaluate})
    except (_TrainingFailed, NonFiniteGradientsError) as given_up:
        if undo is not None:
            undo.restore()
            guard.params_changed()
        if isinstance(given_up, NonFiniteGradientsError):
            raise
        forget_state(guard.optimizer, known)
        loss, blamed = given_up.args
        guard.skip(blamed)
        return loss


def _call_closure(guard: StepGuard, closure: Callable[[], Any]) -> Any:
    """Call a closure as outside of a step, during which casts are off. They stay off where they are forced off."""
    casts = guard.owner().casts
    # True, as the step has replaced what the thread had set.
    casting = contextlib.nullcontext() if casts is None else casts.switched(None if casts.in_modules else True)
    with casting, torch.enable_grad():
        return closure()


def _evaluate(guard: StepGuard, closure: Callable[[], Any], attempts: int) -> tuple[Any, OverflowCheck | None]:
    """Evaluate a closure, at lower scales if it overflows. Returns its loss, and the check left to blame.

    Where no lower scale helps the scales are those after the first evaluation, as after any other skip.
    """
    grads = guard.grads
    if guard.history.steps > 1 and grads.last is None:
        # The steps before scaled no loss, so gradients are not copied. If this one does, its first overflow is a skip.
        attempts = 1
    may_repeat = attempts > 1 and any(scaler.checks for scaler in guard.grads.scalers)
    before = GradsCopy(grads.params()) if may_repeat else None
    first: OverflowCheck | None = None
    states: list[tuple[LossScaler, dict[str, Any]]] = []
    for attempt in range(attempts):
        if attempt and before is not None:
            # The closure may leave zero_grad() to the lines before the step, or add to the gradients of other losses.
            before.restore(grads.params())
        loss = _call_closure(guard, closure)
        guard.owner().refuse_scaled(guard)
        grads.collect()
        grads.finish_delayed()
        loss_is_nonfinite = not _is_finite(loss)
        if (group := grads.group) is not None:
            loss_is_nonfinite = bool(grads.agree(group, loss_is_nonfinite=loss_is_nonfinite).loss_is_nonfinite)
        else:
            # A loss is of one rank, and all ranks that have reduced their gradients are to do the same.
            loss_is_nonfinite = loss_is_nonfinite and not several_processes()
            grads.recheck(makes_gradients=True)
        # A pass may have had a lower scale than its scaler, which tells whether there is a lower one.
        scales = {id(check.scaler): check.scaler.loss_scale for check in grads.checks}
        blamed = grads.resolve()
        # A lower scale helps against large gradients, not against a loss that is inf already.
        if blamed is None or loss_is_nonfinite or blamed.scaler.loss_scale >= scales[id(blamed.scaler)]:
            break
        if first is None:
            first, states = blamed, [(scaler, LossScaler.state_dict(scaler)) for scaler in grads.scalers]
    if blamed is not None and first is not None:
        for scaler, state in states:
            # Those of a subclass may have a format of its own.
            LossScaler.load_state_dict(scaler, state)
        blamed = first
    return loss, blamed


def _is_finite(loss: Any) -> bool:
    if isinstance(loss, Tensor):
        return bool(loss.detach().isfinite().all())
    return not isinstance(loss, float) or math.isfinite(loss)


# -- to undo a step that meets inf or nan in its middle --


class StepCopy:
    """The parameters, state and options of an optimizer, with their values before a step.

    Args:
        optimizer: It is about to step.
    """

    def __init__(self, optimizer: Any) -> None:
        params = stepped_params(optimizer)
        # Frozen parameters may be inference tensors, which nothing can write to.
        self._params = [(param, param.detach().clone()) for param in params if not param.is_inference()]
        # Other objects in a group, such as a module, stay the ones that they are.
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, map_tensors({**group, "params": None}, lambda value: value.detach().clone()))
            for group in optimizer.param_groups
        ]
        state = getattr(optimizer, "state", None)
        self._state = state if isinstance(state, MutableMapping) else {}
        # State that refers to a parameter goes on referring to it.
        memo: dict[int, Any] = {id(param): param for param in params}
        self._values = {key: copy.deepcopy(value, memo) for key, value in self._state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Give all of them their values of before."""
        for param, value in self._params:
            param.copy_(value)
        for group, options in self._groups:
            params = group["params"]
            group.clear()
            group.update(options, params=params)
        self._state.clear()
        self._state.update(self._values)


class GradsCopy:
    """The gradients that are there before a closure is evaluated, with their values."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._of = [(param, param.grad, param.grad.detach().clone()) for param in params if param.grad is not None]

    @torch.no_grad()
    def restore(self, params: Iterable[Tensor]) -> None:
        """Give all parameters what they had."""
        for param in params:
            param.grad = None
        for param, grad, value in self._of:
            grad.copy_(value)
            param.grad = grad


def state_size(optimizer: Any) -> int:
    """Return the number of parameters for which the optimizer has a state."""
    state = getattr(optimizer, "state", None)
    return len(state) if isinstance(state, Mapping) else 0


def forget_state(optimizer: Any, known: int) -> None:
    """Drop the states that the optimizer has made since it had so many: a skipped step leaves none."""
    state: Any = getattr(optimizer, "state", None)
    for key in list(state)[known:] if isinstance(state, Mapping) else ():
        del state[key]
