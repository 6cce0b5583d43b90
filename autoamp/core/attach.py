"""Optimizers as they are seen from outside: what is one, what it steps, methods put in place of its own, and copies.

An optimizer is anything with ``param_groups`` and ``step``, of torch's class or not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoamp.core.links import link_of
from autoamp.errors import UsageError, kind_of
from autoamp.tensors import map_tensors

T = TypeVar("T")


def is_optimizer(value: Any) -> bool:
    """Whether a value has ``param_groups`` and ``step``."""
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


class ScalesItself:
    """Marks an optimizer that scales its losses itself, as `FP16_Optimizer` does. No handle guards it."""

    __slots__ = ()


def refuse_unguardable(optimizer: Any) -> None:
    """Raise UsageError for what is no optimizer, or one that scales its losses itself: they would be scaled twice."""
    if not is_optimizer(optimizer):
        raise UsageError(
            f"Expected an optimizer, got {kind_of(optimizer)}, which has no param_groups and step(). Pass the "
            "optimizer that steps this loss, or a list or tuple of optimizers"
        )
    if isinstance(optimizer, ScalesItself):
        raise UsageError(
            f"this {type(optimizer).__name__} scales its loss itself: call optimizer.backward(loss), or give the "
            "optimizer that it was made from"
        )


def stepped_params(optimizer: Any) -> list[Tensor]:
    """Return the tensors that an optimizer steps, in its order."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        # A copy in C: this is asked for several times in each step.
        return list(groups[0]["params"])
    return [param for group in groups for param in group["params"]]


def named_params(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of an optimizer with the best name to be had. Slow; for error messages.

    The names that the optimizer was given come first, then those in living modules, then the place in ``param_groups``.
    """
    in_modules = _names_in_live_modules()
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or ()
        for position, param in enumerate(group["params"]):
            place = f"param_groups[{index}]['params'][{position}] of shape {tuple(param.shape)}"
            yield (given[position] if position < len(given) else in_modules.get(id(param), place)), param


class AttachedMethod:
    """Stands at a method of an optimizer, as an attribute of the instance, from its making until `detach`.

    It refers to the optimizer weakly. A deep copy of the optimizer, or an unpickled one, has the method that was there
    before. It has the attributes of a bound method, which torch's LR schedulers ask for: they wrap ``step.__func__``.

    Args:
        optimizer: Gets the attribute.
        method: Its name.
        instead: Called for ``optimizer.method(*args, **kwargs)`` with the original, ``args`` and ``kwargs``.

    Raises:
        UsageError: This is no optimizer, or takes no such attribute of its own.
    """

    def __init__(
        self,
        optimizer: Any,
        method: str,
        instead: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        name = type(optimizer).__name__
        original = getattr(optimizer, method, None)
        if not callable(original) or not hasattr(optimizer, "param_groups"):
            raise UsageError(f"Expected an optimizer with param_groups and a method {method}, got {kind_of(optimizer)}")
        in_class = getattr(type(optimizer), method, None)
        # First of all, as it copies every attribute of the other method. Wanted is `_wrapped_by_lr_sched`, by which a
        # scheduler knows that its wrapper is still there; `__wrapped__` would keep the optimizer alive.
        functools.update_wrapper(self, original)
        vars(self).pop("__wrapped__", None)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(original)
        self._instead: Callable[..., Any] | None = instead
        self._name = name
        self._method = method
        try:
            self._optimizer = weakref.ref(optimizer)
            self._own = vars(optimizer).get(method)
            # A method of the class is looked up for each call: a bound one, if stored, would keep the optimizer alive.
            self._before = self._own or (None if callable(in_class) else original)
            setattr(optimizer, method, self)
        except (AttributeError, TypeError) as error:
            raise UsageError(
                f"{name}.{method} cannot be replaced ({error}); its class must allow attributes"
            ) from error

    def detach(self) -> None:
        """Put back what was there. Under a wrapper that somebody layered above, pass every call through instead."""
        self._instead = None
        optimizer = self._optimizer()
        if optimizer is None or vars(optimizer).get(self._method) is not self:
            return
        if self._own is not None:
            setattr(optimizer, self._method, self._own)
        else:
            delattr(optimizer, self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, as ``instead`` sees fit."""
        original = self._before
        if original is None:
            optimizer = self._optimizer() or self.__self__
            original = types.MethodType(getattr(type(optimizer), self._method), optimizer)
        return original(*args, **kwargs) if self._instead is None else self._instead(original, args, kwargs)

    @property
    def __self__(self) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            raise UsageError(f"the {self._name} of this {self._method} was deleted; keep a reference to the optimizer")
        return optimizer

    @property
    def __func__(self) -> Callable[..., Any]:
        @functools.wraps(self)
        def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return method

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the optimizer is copied without this attribute as yet, so the name finds the method of its class.
        if self._before is not None:
            return _same, (self._before,)
        return getattr, (self.__self__, self._method)


def guard_before(optimizer: Any) -> Any:
    """Return the guard that is attached to an optimizer's step, also if it is none of the handle's; None without."""
    step = vars(optimizer).get("step")
    return getattr(step._instead, "__self__", None) if isinstance(step, AttachedMethod) else None


def living_optimizers_and_modules() -> tuple[list[torch.optim.Optimizer], list[torch.nn.Module]]:
    """Return the optimizers that have groups, and the modules, that live, as far as the garbage collector tells.

    Of torch's classes; an optimizer that scales its loss itself is left out.
    """
    # Not isinstance, which asks the object itself: a proxy may answer with another class.
    kinds = torch.optim.Optimizer, torch.nn.Module
    found: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    optimizers = [one for one in found if issubclass(type(one), torch.optim.Optimizer) and "param_groups" in vars(one)]
    modules = [one for one in found if issubclass(type(one), torch.nn.Module)]
    return [one for one in optimizers if not isinstance(one, ScalesItself)], modules


def _same(value: Any) -> Any:
    return value


def _names_in_live_modules() -> dict[int, str]:
    """Return the names that living modules give to parameters, and to their masters."""
    _, modules = living_optimizers_and_modules()
    names: dict[int, str] = {}
    for module in modules:
        # A module that is half built answers nothing, and must not hide the error that names are looked for.
        with contextlib.suppress(Exception):
            for name, param in module.named_parameters():
                link = link_of(param)
                # The optimizer steps the master of a half parameter.
                for tensor in (param,) if link is None else (param, link.master):
                    known, whole = names.get(id(tensor), ""), f"{type(module).__name__}.{name}"
                    # The path from the outermost module has most parts.
                    names[id(tensor)] = whole if whole.count(".") > known.count(".") else known
    return names


def takes_flag(optimizer: Any) -> bool:
    """Whether an optimizer takes the flag of an overflow on its device, and changes nothing where that is set.

    Not one that wants a whole `GradScaler`, by an older convention. Nor one of a subclass with a step of its own that
    inherits ``_step_supports_amp_scaling`` from a class of torch: what its step does besides calling that one, it would
    do in a skipped step too.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    kind = type(optimizer)
    step = getattr(kind, "step", None)
    # Torch wraps the step of each class; the wrapper has the module of what it wraps.
    module = getattr(step, "__module__", None) or ""
    if module.startswith("torch.optim."):
        return True
    own = [base for base in kind.__mro__ if base.__module__ == module and "_step_supports_amp_scaling" in vars(base)]
    return bool(own) and callable(step) and "grad_scaler" not in inspect.signature(step).parameters


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
