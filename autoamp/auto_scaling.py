"""Loss scaling for programs that know nothing of it: ``loss.backward()`` scales, and gradients come out unscaled.

The scale goes in with the gradient of the root, so the graph is the program's own. While the backward pass runs, what
is in ``.grad`` of the tensors that it reaches has the scale; after it all have true values again, as after a
``scale_loss`` block. What was found in them goes as one verdict to the guards of the optimizers that step them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from autoamp.backward_passes import (
    ScaledPass,
    can_begin_at,
    largest_scale,
    listed,
    reached_by,
    scaled_gradients,
)
from autoamp.errors import UsageError
from autoamp.guarding import GuardedOptimizers
from autoamp.patching import PatchSet, dress, original_of
from autoamp.scaling import LossScaler, open_blocks
from autoamp.stepping import StepGuard
from autoamp.tensors import iter_tensors
from autoamp.torch_private import current_graph_task
from autoamp.unaware_closures import step_unaware

__all__ = ["AutoScale"]

log = logging.getLogger(__name__)


class AutoScale:
    """Scales every backward pass of the program that ends in parameters of an optimizer, until `stop`.

    Left alone are `torch.autograd.grad`, passes with ``create_graph=True``, those that reach no optimizer's parameter,
    and all once the program scales its losses itself: in a ``scale_loss`` block or an ``FP16_Optimizer`` for as long as
    that runs, and for good once it has made an enabled `torch.amp.GradScaler` or has entered an enabled
    `torch.autocast` region.

    Hooks of tensors and modules see true gradients. Hooks of autograd nodes, and what runs within a custom
    ``autograd.Function``, see scaled ones.

    Args:
        optimizers: Guards the optimizers.
        scaler: Gives the scale.
    """

    def __init__(self, optimizers: GuardedOptimizers, scaler: LossScaler) -> None:
        self._optimizers = optimizers
        self._scaler = scaler
        self._patches = PatchSet()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        # By identity, since tensors compare by element.
        self._retained = WeakTensorKeyDictionary()
        self._open: list[ScaledPass] = []
        self._aside: str | None = None
        self.active = False

    def start(self) -> AutoScale:
        """Put the patches in place, and guard the optimizers that are there.

        Raises:
            UsageError: An optimizer steps master weights.
        """
        if self._optimizers.has_masters:
            raise UsageError("auto_scale() is for fp32 models, and an optimizer here has masters; use scale_loss")
        self.active = True
        self.resume()
        return self

    def resume(self) -> None:
        """Go on after `pause`, if it was not stopped."""
        if self.active and not len(self._patches):
            self._patch()
            self._look_around()

    def pause(self) -> None:
        """Take the patches back for a while."""
        self._patches.restore()

    def _patch(self) -> None:
        patched: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (torch.autograd, "backward", self._around_backward),
            (Tensor, "retain_grad", self._around_retain_grad),
            (Tensor, "register_hook", self._around_register(_GradientHook)),
            (Tensor, "register_post_accumulate_grad_hook", self._around_register(_PostAccumulateHook)),
            (Module, "register_backward_hook", self._around_register(_GradientHook)),
            (Module, "register_full_backward_hook", self._around_register(_GradientHook)),
            (Module, "register_full_backward_pre_hook", self._around_register(_GradientHook)),
            (torch.nn.modules.module, "register_module_full_backward_hook", self._around_register_for_all),
            (torch.nn.modules.module, "register_module_full_backward_pre_hook", self._around_register_for_all),
            (Optimizer, "__init__", lambda f: self._afterwards(f, self._meet)),
            (Optimizer, "__setstate__", lambda f: self._afterwards(f, self._meet)),
            (torch.amp.GradScaler, "__init__", lambda f: self._afterwards(f, self._notice_scaler)),
            (torch.autocast, "__enter__", lambda f: self._afterwards(f, self._notice_autocast)),
        ]
        with self._patches.all_or_nothing():
            for owner, name, around in patched:
                # Some are inherited: Tensor has them from its base.
                original = inspect.getattr_static(owner, name)
                self._patches.replace(owner, name, dress(around(original), original, owner.__name__, name))
            backward = torch.autograd.backward
            self._patches.rebind({id(original_of(backward)): (original_of(backward), backward)}, _is_torchs)

    def _look_around(self) -> None:
        for found in gc.get_objects():
            # By type: a proxy may answer for what it stands for.
            if issubclass(type(found), Optimizer):
                self._meet(found)
            elif issubclass(type(found), torch.amp.GradScaler):
                self._notice_scaler(found)

    def stop(self) -> None:
        """Take the patches back. The optimizers stay guarded, for verdicts that their next step is to read."""
        self.active = False
        self.pause()

    def __enter__(self) -> AutoScale:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def standing_aside(self) -> str | None:
        """What the program scales its losses with, None where that is left to us."""
        return self._aside

    # -- what the program makes --

    def _meet(self, optimizer: Any) -> None:
        # An FP16_Optimizer guards what it holds, and a half-built optimizer has no groups.
        if self.active and not isinstance(getattr(optimizer, "_guard", None), StepGuard):
            with contextlib.suppress(AttributeError):
                if optimizer.param_groups:
                    self._optimizers.guard(optimizer, check=False).step_closure = step_unaware
                    self._known.add(optimizer)

    def _notice_scaler(self, scaler: torch.amp.GradScaler) -> None:
        if getattr(scaler, "_enabled", False):
            self._stand_aside("torch.amp.GradScaler")

    def _notice_autocast(self, region: torch.autocast) -> None:
        # A region for an evaluation, or for another device, says nothing of how the program trains.
        if region._enabled and region.device == self._optimizers.device_type and torch.is_grad_enabled():
            self._stand_aside("torch.autocast")

    def _stand_aside(self, whom: str) -> None:
        if self._aside is None:
            self._aside = whom
            log.info("the program uses %s: scaling its losses is left to it", whom)

    def _afterwards(self, original: Any, notice: Callable[[Any], None]) -> Any:
        def replacement(self_: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self_, *args, **kwargs)
            if not torch.compiler.is_compiling():
                notice(self_)
            return result

        return replacement

    # -- backward passes --

    def _around_backward(self, original: Any) -> Any:
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            roots = listed(tensors)
            given = listed(grad_tensors if grad_variables is None else grad_variables)
            run = functools.partial(original, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
            if current_graph_task() != -1:
                self._join(run, roots, given, inputs)
                return
            ours = not create_graph and self._is_ours(roots, given)
            owners, reached = (self._owners(), reached_by(roots, inputs)) if ours else ({}, ([], set()))
            if owners.keys().isdisjoint(map(id, reached[0])):
                run(tensors, grad_tensors, grad_variables=grad_variables)
                return
            with self._pass(owners, largest_scale(roots), *reached) as scale:
                run(roots, scaled_gradients(roots, given, scale))

        return backward

    def _join(self, run: Callable[[Any, Any], None], roots: list[Any], given: list[Any], inputs: Any) -> None:
        """Run a pass within a pass, such as a checkpoint's: given gradients have the scale, an implied 1 has not."""
        running = self._running()
        if running is None or (given and len(given) != len(roots)):
            run(roots, given or None)
            return
        running.take(*reached_by(roots, inputs))
        gradients = []
        for root, gradient in zip(roots, given or [None] * len(roots), strict=True):
            implied = gradient is None and can_begin_at(root, None)
            gradients.append(scaled_gradients([root], [], running.scale)[0] if implied else gradient)
        run(roots, gradients)

    def _is_ours(self, roots: Sequence[Any], given: Sequence[Any]) -> bool:
        """Tell whether a pass is ours to scale. One that is wrong is not: torch has its own errors for it."""
        return (
            self._scaler.checks
            and self._aside is None
            and not open_blocks.count
            and not torch.compiler.is_compiling()
            and (not given or len(given) == len(roots))
            and all(map(can_begin_at, roots, given or [None] * len(roots)))
        )

    def _owners(self) -> dict[int, list[StepGuard]]:
        """Return the guards of the optimizers that step a tensor, by its id."""
        owners: dict[int, list[StepGuard]] = {}
        for optimizer in list(self._known):
            guard = self._optimizers.guard(optimizer, check=False)
            for param in guard.params():
                owners.setdefault(id(param), []).append(guard)
        return owners

    @contextlib.contextmanager
    def _pass(
        self, owners: Mapping[int, list[StepGuard]], largest: float, leaves: list[Tensor], nodes: set[Any]
    ) -> Iterator[float]:
        running = ScaledPass(self._scaler, owners, self._retained, largest)
        self._open.append(running)
        try:
            running.take(leaves, nodes)
            yield running.scale
        finally:
            self._open.remove(running)
            running.close()

    # -- what the program sees of it --

    def _around_retain_grad(self, original: Any) -> Any:
        def retain_grad(self_: Tensor) -> None:
            original(self_)
            if not self_.is_leaf:
                self._retained[self_] = None

        return retain_grad

    def _around_register(self, kind: type[_Hook]) -> Callable[[Any], Any]:
        def around(original: Any) -> Any:
            def register(self_: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
                # A tensor subclass comes by twice, on its way through __torch_function__.
                if callable(hook) and not isinstance(hook, _Hook) and not torch.compiler.is_compiling():
                    hook = kind(hook, self._running)
                return original(self_, hook, *args, **kwargs)

            return register

        return around

    def _around_register_for_all(self, original: Any) -> Any:
        def register(hook: Any) -> Any:
            return original(_GradientHook(hook, self._running) if callable(hook) else hook)

        return register

    def _running(self) -> ScaledPass | None:
        if not self._open:
            return None
        # Autograd's own threads, which Python has not begun, run the passes of others.
        if isinstance(threading.current_thread(), threading._DummyThread):
            return self._open[-1]
        ours = threading.get_ident()
        return next((running for running in reversed(self._open) if running.thread == ours), None)


class _Hook:
    """A hook of the program that is to see true gradients. It is copied and pickled as the hook itself."""

    def __init__(self, hook: Callable[..., Any], running: Callable[[], ScaledPass | None]) -> None:
        # Torch's own wrapper of a hook takes over what is in our __dict__, so that common names would hide its own.
        self._autoamp_hook = hook
        self._autoamp_running = running
        functools.update_wrapper(self, hook, updated=())

    def __call__(self, *args: Any) -> Any:
        running = self._autoamp_running()
        return self._autoamp_hook(*args) if running is None else self.within(running, *args)

    def within(self, running: ScaledPass, *args: Any) -> Any:
        """Call the hook while a scaled pass runs."""
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> _Hook:
        return type(self)(copy.deepcopy(self._autoamp_hook, memo), self._autoamp_running)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._autoamp_hook,)


class _GradientHook(_Hook):
    """Gets gradients as arguments, and may return others for them."""

    def within(self, running: ScaledPass, *args: Any) -> Any:
        scale = running.scale
        true = [_each(lambda gradient: gradient / scale, given) for given in args]
        versions = [tensor._version for tensor in _tensors(true)]
        result = self._autoamp_hook(*true)
        if result is None and [tensor._version for tensor in _tensors(true)] != versions:
            # It wrote to what it was given.
            result = true[-1]
        return _each(lambda gradient: gradient * scale, result)


class _PostAccumulateHook(_Hook):
    """Gets a tensor whose ``.grad`` is complete."""

    def within(self, running: ScaledPass, *args: Any) -> Any:
        # It may well step the optimizer: this gradient is done, and its verdict is due now.
        running.finish_early(args[0])
        return self._autoamp_hook(*args)


def _same(value: Any) -> Any:
    return value


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in iter_tensors(values) if not value.is_inference()]


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_each(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value


def _is_torchs(module_name: str) -> bool:
    return module_name == "torch" or module_name.startswith("torch.")
