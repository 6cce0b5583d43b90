"""Optimizers as they are seen from outside, and how half parameters and fp32 masters belong together.

An optimizer is anything with ``param_groups`` and ``step``, of torch's class or not. Here is what it steps, what stands
in place of its own methods, what a copy of it keeps, and which of a half parameter and its master is copied to the
other.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.core.gradients import is_sharded, local_of, several_processes, version_of, versions_of
from autoamp.errors import UsageError, kind_of
from autoamp.tensors import HALF_DTYPES, without_grad
from autoamp.torch_private import disable_in_dynamo

# What changes where torch reports a write: the versions of a tensor and of its local part, and the address of its data.
_State = tuple[int | None, int | None, int]

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


class MasterLink:
    """A master, and what its half parameter was when the two last agreed.

    Attributes:
        master: The fp32 tensor.
        shared: A weak reference to the gradient that both have had; None for none.
        half_state: The state of the half parameter when the two last agreed.
        master_state: The state of the master then.
        equal_by: The wrapper that made the masters of all processes equal, referred to weakly; None before that.
        stepped: Whether the master is authoritative, which it is from the first step on.
    """

    __slots__ = ("_shared_version", "equal_by", "half_state", "master", "master_state", "shared", "stepped")

    def __init__(self, half: Tensor, master: Tensor) -> None:
        self.master = master
        self.share(None)
        self.equal_by: weakref.ref[Any] | None = None
        self.stepped = False
        self.half_state: _State
        self.master_state: _State
        mark_equal([(half, self)])

    def share(self, grad: Tensor | None) -> None:
        """Note that both have this gradient now. The link holds a weak reference to it."""
        # What it gives is compared and nothing else, so it need not be a `TensorWeakRef`.
        self.shared = None if grad is None else weakref.ref(grad)
        # Written out for plain tensors: this runs for each parameter of each step.
        if type(grad) is Tensor and not grad.is_inference():
            self._shared_version: int | None = grad._version
        else:
            self._shared_version = None if grad is None else version_of(grad)

    def wrote_to(self, grad: Tensor) -> bool:
        """Whether torch reports a write to the gradient that both have had."""
        return version_of(grad) != self._shared_version

    def shares(self, grad: Tensor | None) -> bool:
        """Whether a gradient of either of the two is the one that `share` was called with last."""
        if grad is None or self.shared is None:
            return grad is None and self.shared is None
        return self.shared() is grad

    def read(self, half: Tensor, *, whole: bool) -> None:
        """Set the master to the half parameter.

        Elements in which both are the same, inf and nan included, keep the bits that half precision has no room for;
        but not with ``whole``, by which the masters of all processes become equal where the half parameters are.
        """
        value = half.detach().to(device=self.master.device, dtype=self.master.dtype)
        rounded = self.master.detach().to(half.dtype).to(self.master.dtype)
        differs = (value != rounded) & ~(value.isnan() & rounded.isnan())
        self.master.copy_(value if whole else torch.where(differs, value, self.master))
        mark_equal([(half, self)])


# The master of each half parameter, as long as the parameter lives. Optimizers that share a parameter share its master,
# which outlives them.
_links: Any = WeakIdKeyDictionary()


def master_of(parameter: Tensor) -> Tensor | None:
    """Return the fp32 master of a half parameter, None where it has none. Weights written from outside are in it."""
    link = link_of(parameter)
    if link is None:
        return None
    model_to_masters([(parameter, link)])
    return link.master


def link_of(parameter: Tensor) -> MasterLink | None:
    """Return the link of a half parameter as it is, None where it has none."""
    return _links.get(parameter) if parameter.dtype in HALF_DTYPES else None


def load_master(parameter: Tensor, value: Tensor) -> None:
    """Give a half parameter's master, if it has one, an fp32 value of which the parameter has the rounded one already.

    The value may be the master itself, as where `torch.distributed.checkpoint` reads in place.
    """
    link = link_of(parameter)
    if link is not None:
        link.master.copy_(value)
        mark_equal([(parameter, link)])


def trust_masters(parameters: Iterable[Tensor]) -> None:
    """Note that the masters are authoritative from now on, as those are that several processes have loaded alike."""
    for parameter in parameters if several_processes() else ():
        if (link := link_of(parameter)) is not None:
            link.stepped = True


def release_master(parameter: Tensor) -> Tensor | None:
    """Return what `master_of` does, and forget it."""
    master = master_of(parameter)
    _links.pop(parameter, None)
    return master


@contextlib.contextmanager
def equalized(parameters: Iterable[Tensor], wrapper: object) -> Iterator[list[Tensor]]:
    """Yield the masters of parameters, to be broadcast from the process whose parameters all get.

    Args:
        parameters: Those of a model; what has no master is passed over.
        wrapper: What keeps them equal over processes from now on. It is referred to weakly.
    """
    pairs = [(half, link) for half in parameters if (link := _links.get(half)) is not None]
    model_to_masters(pairs, local=True)
    yield [link.master.detach() for _, link in pairs]
    for _, link in pairs:
        link.equal_by = weakref.ref(wrapper)
    # Half parameters are not written to here: a graph may have saved them.
    mark_equal(pairs)


def linked(half: Tensor, original: Tensor | None) -> MasterLink:
    """Return the link of a half parameter, a new one if it has none: to a master with the value of ``original``."""
    link = link_of(half)
    if link is None:
        value = half.detach().float() if original is None else original.detach()
        if type(value) is Tensor:
            # What loops keep at parameters for their optimizers, such as ``lr_mult``, as it is now.
            kept = {name: one for name, one in vars(half).items() if isinstance(one, (int, float, str))}
            vars(value).update({name: one for name, one in kept.items() if not name.startswith("_")})
        _links[half] = link = MasterLink(half, value.requires_grad_(half.requires_grad))
    else:
        model_to_masters([(half, link)])
    return link


def check_shapes(half: Tensor, master: Tensor) -> None:
    """Raise UsageError where a half parameter and its master differ in shape."""
    if half.shape != master.shape:
        raise UsageError(
            f"a half parameter of shape {tuple(half.shape)} has a master of shape {tuple(master.shape)}: it was "
            "reshaped or sharded since; make the optimizer after that (after FullyShardedDataParallel, say)"
        )


@without_grad
def model_to_masters(
    pairs: Iterable[tuple[Tensor, MasterLink]], *, first_step: bool = False, local: bool = False
) -> None:
    """Copy half parameters that the program wrote to into their masters. If it wrote to both, the master stays.

    Args:
        pairs: Half parameters, with their links.
        first_step: Whether a step begins, so that the master weights are authoritative after it, if they were not yet.
        local: Whether the masters of other processes may differ.
    """
    pairs = list(pairs)
    states = zip(pairs, _states([half for half, _ in pairs]), strict=True)
    written = [(*pair, state != pair[1].half_state) for pair, state in states]
    behind = [(half, link, is_written) for half, link, is_written in written if is_written or not link.stepped]
    several = bool(behind) and not local and several_processes()
    for half, link, is_written in behind:
        check_shapes(half, link.master)
        if _states([link.master]) == [link.master_state]:
            # A rank's shard is its own: what replicas of it there are were loaded alike.
            whole = several and link.equal_by is None and not is_sharded(half)
            link.read(half, whole=whole and (first_step or is_written))
        link.stepped = link.stepped or first_step


def has_written_masters() -> bool:
    """Whether the program wrote to a master of the process since it last agreed with its half parameter."""
    links: list[MasterLink] = list(_links.data.values())
    return bool(links) and _states([link.master for link in links]) != [link.master_state for link in links]


def masters_to_model() -> None:
    """Copy masters that the program wrote to into their half parameters. Nothing is launched where it wrote to none.

    For all masters of the process, before each outermost call of a module.
    """
    if has_written_masters():
        with torch.no_grad():
            copy_to_params(written_masters(list(_links.items())))


def written_masters(pairs: Collection[tuple[Tensor, MasterLink]]) -> list[tuple[Tensor, MasterLink]]:
    """Return those pairs whose master the program wrote to since the two last agreed."""
    states = _states([link.master for _, link in pairs])
    return [pair for pair, state in zip(pairs, states, strict=True) if state != pair[1].master_state]


def copy_to_params(pairs: Collection[tuple[Tensor, MasterLink]]) -> None:
    """Round masters into their half parameters, in one multi-tensor copy."""
    if not pairs:
        return
    try:
        halves, masters = [half for half, _ in pairs], [link.master for _, link in pairs]
        if not _PLAIN.issuperset(map(type, (*halves, *masters))):
            halves, masters = list(map(local_of, halves)), list(map(local_of, masters))
        torch._foreach_copy_(halves, masters)
    except RuntimeError:
        for half, link in pairs:
            check_shapes(half, link.master)
        raise
    mark_equal(pairs)


def mark_equal(pairs: Collection[tuple[Tensor, MasterLink]]) -> None:
    """Note that half parameters are equal to their rounded masters."""
    halves, masters = _states([half for half, _ in pairs]), _states([link.master for _, link in pairs])
    for (_, link), half, master in zip(pairs, halves, masters, strict=True):
        link.half_state, link.master_state = half, master


def _states(tensors: Sequence[Tensor]) -> list[_State]:
    """Return the state of each tensor, by sweeps that hundreds of them do not slow."""
    parts = tensors if _PLAIN.issuperset(map(type, tensors)) else list(map(local_of, tensors))
    versions = versions_of(tensors)
    of_parts = versions if parts is tensors else versions_of(parts)
    return list(zip(versions, of_parts, map(Tensor.data_ptr, parts), strict=True))


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


def refuse_inner_groups(optimizer: Any, halved: Iterable[Tensor] | None = None, given: Sequence[Any] = ()) -> None:
    """Raise UsageError for an optimizer that steps half parameters by another one, which has lists of its own.

    Masters that take their places in the outer groups would never be stepped. An inner one that has the outer one's own
    lists gets them too.

    Args:
        optimizer: Gets masters.
        halved: The parameters that are cast to half precision; None for those that are half already.
        given: What gets masters beside it.
    """
    own = stepped_params(optimizer)
    halves = [param for param in own if param.dtype in HALF_DTYPES] if halved is None else halved
    lists, meant = {id(group["params"]) for group in optimizer.param_groups}, set(map(id, own)) & set(map(id, halves))
    for attribute, inner in _inner_optimizers(optimizer) if meant else ():
        inner_lists = [group["params"] for group in inner.param_groups]
        if any(inner is one for one in given) or all(
            id(params) in lists or meant.isdisjoint(map(id, params)) for params in inner_lists
        ):
            continue
        is_zero = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
        raise UsageError(
            f"{type(optimizer).__name__} steps by an optimizer of its own, a {type(inner).__name__} in .{attribute}, "
            "whose lists of parameters master weights do not reach; make it after initialize(model, ...), which is "
            "given the model alone" + ("" if is_zero else f", and give scale_loss what is in .{attribute}")
        )


def _inner_optimizers(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers that are attributes of an optimizer, or in a list, tuple or dict there, with its name."""
    for name, value in getattr(optimizer, "__dict__", {}).items():
        values = list(value.values()) if type(value) is dict else value if type(value) in (list, tuple) else [value]
        yield from ((name, inner) for inner in values if inner is not optimizer and _has_lists(inner))


def _has_lists(value: Any) -> bool:
    """Whether a value is an optimizer with lists of parameters."""
    try:
        return is_optimizer(value) and all(isinstance(group["params"], list) for group in value.param_groups)
    except Exception:
        # Whatever an optimizer keeps may answer badly: a proxy of what is gone, a module that is not installed.
        return False


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
    while step is not None and not isinstance(step, AttachedMethod):
        # A scheduler may have wrapped it.
        step = getattr(step, "__wrapped__", None)
    return None if step is None else getattr(step._instead, "__self__", None)


def living(*kinds: type) -> list[Any]:
    """Return the instances of these classes that live, as far as the garbage collector tells. Takes tens of ms.

    Not by isinstance, which asks the object itself: a proxy may answer with another class.
    """
    classes, left = {id(cls): cls for cls in kinds}, list(kinds)
    while left:
        derived: list[type] = type.__subclasses__(left.pop())
        left += [cls for cls in derived if id(cls) not in classes]
        classes |= {id(cls): cls for cls in derived}
    # All objects are in a list within one call of C alone. While Python code runs, other threads do too, and one that
    # builds a tuple fails where somebody else refers to it. An instance refers to its class.
    every = itertools.chain.from_iterable(map(gc.get_objects, (None,)))
    present = classes.keys() & set(map(id, map(type, every)))
    return [one for one in gc.get_referrers(*map(classes.__getitem__, present)) if id(type(one)) in present]


@disable_in_dynamo
def living_optimizers_and_modules() -> tuple[list[torch.optim.Optimizer], list[torch.nn.Module]]:
    """Return the optimizers that have groups, and the modules, that live, as far as the garbage collector tells.

    Of torch's classes; an optimizer that scales its loss itself is left out.
    """
    found = living(torch.optim.Optimizer, torch.nn.Module)
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
