"""Loss scaling for programs that know nothing of it: ``loss.backward()`` scales, and gradients come out unscaled.

The scale goes in with the gradient of the root, so the graph is the program's own, and comes out of each gradient where
it arrives at a leaf. What was found there goes as one verdict to the guards of the optimizers that step the leaves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from autoamp.auto_scaling.backward_pass import (
    ScaledPass,
    can_begin_at,
    largest_scale,
    listed,
    reached_by,
    scaled_gradients,
)
from autoamp.auto_scaling.hooks import GradientHook, Hook, PostAccumulateHook, RunningPasses, is_ours
from autoamp.errors import UsageError
from autoamp.patching import PatchSet, imitate, original_of
from autoamp.scaling import LossScaler, is_flat, is_sharded
from autoamp.stepping import (
    GuardedOptimizers,
    ScalesItself,
    StepGuard,
    living_optimizers,
    open_blocks,
    several_processes,
)
from autoamp.torch_private import TELLS_GRAPH_TASKS

__all__ = ["AutoScale"]

log = logging.getLogger(__name__)

_SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"


class AutoScale:
    """Scales every backward pass of the program that ends in parameters of an optimizer, until `stop`.

    Left alone are `torch.autograd.grad`, passes with ``create_graph=True``, those that reach no optimizer's parameter,
    and all once the program scales its losses itself: in a ``scale_loss`` block or an ``FP16_Optimizer`` for as long as
    that runs, and for good once an enabled `torch.amp.GradScaler` has scaled a loss, or the program has entered an
    enabled `torch.autocast` region with gradients on.

    Hooks of tensors and modules see true gradients. Hooks of autograd nodes, and what runs within a custom
    ``autograd.Function``, see scaled ones.

    Args:
        optimizers: Guards the optimizers.
    """

    _scaler: LossScaler

    def __init__(self, optimizers: GuardedOptimizers) -> None:
        self._optimizers = optimizers
        self._patches = PatchSet()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        # By identity, since tensors compare by element.
        self._retained = WeakTensorKeyDictionary()
        self._passes = RunningPasses()
        self._yielded_to: str | None = None
        self._made_scaler = self._used_scaler = False
        self.active = False

    def start(self) -> AutoScale:
        """Put the patches in place, and guard the optimizers that are there.

        Raises:
            UsageError: An optimizer steps master weights, or this torch does not number its backward passes.
        """
        if not TELLS_GRAPH_TASKS:
            raise UsageError(
                f"auto_scale() needs torch._C._current_graph_task_id, and torch {torch.__version__} has none; use "
                "scale_loss, or bf16, which needs no loss scale"
            )
        if self._optimizers.has_masters:
            raise UsageError("auto_scale() is for fp32 models, and an optimizer here has masters; use scale_loss")
        self._scaler = self._optimizers.loss_scalers.choose(0)
        # What an earlier training used says nothing of the next one.
        self._yielded_to = None
        self.active = True
        self.resume()
        return self

    def resume(self) -> None:
        """Go on after `pause`, if it was not stopped."""
        if self.active and not len(self._patches):
            self._patch()
            for optimizer in living_optimizers():
                self._guard_new(optimizer)

    def pause(self) -> None:
        """Take the patches back for a while."""
        self._patches.restore()
        self._optimizers.on_unguarded = None

    def _patch(self) -> None:
        patched: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (torch.autograd, "backward", self._around_backward),
            (Tensor, "retain_grad", self._around_retain_grad),
            (Tensor, "register_hook", self._around_register(GradientHook)),
            (Tensor, "register_post_accumulate_grad_hook", self._around_register(PostAccumulateHook)),
            (Module, "register_backward_hook", self._around_register(GradientHook)),
            (Module, "register_full_backward_hook", self._around_register(GradientHook)),
            (Module, "register_full_backward_pre_hook", self._around_register(GradientHook)),
            (torch.nn.modules.module, "register_module_full_backward_hook", self._around_register_for_all),
            (torch.nn.modules.module, "register_module_full_backward_pre_hook", self._around_register_for_all),
            (Optimizer, "__init__", lambda f: _afterwards(f, self._guard_new)),
            (Optimizer, "__setstate__", lambda f: _afterwards(f, self._guard_new)),
            (torch.amp.GradScaler, "__init__", lambda f: _afterwards(f, self._notice_scaler)),
            (torch.amp.GradScaler, "scale", lambda f: _afterwards(f, self._notice_scale)),
            (torch.autocast, "__enter__", lambda f: _afterwards(f, self._notice_autocast)),
        ]
        if _SHARDED in sys.modules:
            patched.append(self._sharded_scaler(sys.modules[_SHARDED]))
        else:
            self._patches.when_imported(_SHARDED, lambda module: self._replace(*self._sharded_scaler(module)))
        before = torch.autograd.backward
        with self._patches.all_or_nothing():
            for owner, name, around in patched:
                self._replace(owner, name, around)
            backward = torch.autograd.backward
            # Torch's own one, and that which takes note of losses.
            taken = (original_of(backward), before)
            self._patches.rebind({id(one): (one, backward) for one in taken}, lambda _: False)

        # Those that `resume` does not find: nobody tells of objects that `gc.freeze()` has frozen.
        self._optimizers.on_unguarded = self._guard_new

    def _replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        # Some are inherited: Tensor has them from its base.
        original = inspect.getattr_static(owner, name)
        self._patches.replace(owner, name, imitate(around(original), original, owner.__name__, name))

    def _sharded_scaler(self, module: Any) -> tuple[Any, str, Callable[[Any], Any]]:
        """Return what to patch of torch's other class of scalers, whose ``scale()`` is its own."""
        return module.ShardedGradScaler, "scale", lambda f: _afterwards(f, self._notice_scale)

    def stop(self) -> None:
        """Take the patches back. The optimizers stay guarded, for verdicts that their next step is to read."""
        self.active = False
        self.pause()

    def __enter__(self) -> AutoScale:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def yielded_to(self) -> str | None:
        """What the program itself scales its losses or casts with, None where this object scales."""
        return self._yielded_to or self._optimizers.casts.yielded_to

    @property
    def has_unused_scaler(self) -> bool:
        """Whether the program made an enabled `torch.amp.GradScaler`, and none has scaled a loss."""
        return self._made_scaler and not self._used_scaler

    # -- what the program makes --

    def _guard_new(self, optimizer: Any) -> None:
        # An FP16_Optimizer guards the optimizer within it, and a half-built optimizer has no groups.
        if self.active and not isinstance(optimizer, ScalesItself):
            with contextlib.suppress(AttributeError):
                if optimizer.param_groups:
                    self._optimizers.guard(optimizer, check=False).repeats_closure = False
                    self._known.add(optimizer)

    def _notice_scaler(self, scaler: torch.amp.GradScaler) -> None:
        # A scaler that is half built cannot tell yet.
        with contextlib.suppress(AttributeError):
            self._made_scaler = self._made_scaler or scaler.is_enabled()

    def _notice_scale(self, scaler: torch.amp.GradScaler) -> None:
        if scaler.is_enabled():
            self._used_scaler = True
            self.yield_to("torch.amp.GradScaler")

    def _notice_autocast(self, region: torch.autocast) -> None:
        # A region for an evaluation, or for another device, says nothing of how the program trains.
        if region._enabled and region.device == self._optimizers.casts.device_type and torch.is_grad_enabled():
            self.yield_to("torch.autocast")

    def yield_to(self, whom: str) -> None:
        """Scale nothing any more.

        Args:
            whom: What the program scales its losses with, for the log.
        """
        if self._yielded_to is None:
            self._yielded_to = whom
            log.info("the program uses %s: autoamp does not scale its losses", whom)

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
            running = self._passes.joinable()
            if running is not None:
                self._join(running, run, roots, given, inputs)
                return
            running = None if create_graph or not self._is_ours(roots, given) else self._begin(roots, inputs)
            if running is None:
                run(tensors, grad_tensors, grad_variables=grad_variables)
                return
            try:
                with self._passes.claimed(running, roots):
                    run(roots, scaled_gradients(roots, given, running.scale))
            finally:
                running.close()
                self._passes.end(running)

        return backward

    def _begin(self, roots: list[Any], inputs: Any) -> ScaledPass | None:
        """Make the pass that begins at the roots; None if it reaches nothing that an optimizer steps."""
        owners: dict[int, list[StepGuard]] = {}
        sharded: list[StepGuard] = []
        # With their optimizers, which a collection of garbage cannot take away from them so long.
        guards = {self._optimizers.guard(optimizer): optimizer for optimizer in list(self._known)}
        for guard in guards:
            params = guard.grads.params()
            for param in params:
                owners.setdefault(id(param), []).append(guard)
            if any(map(is_sharded, params)):
                sharded.append(guard)
        leaves, nodes = reached_by(roots, inputs)
        shared = several_processes()
        if shared and owners and any(map(is_flat, leaves)):
            raise UsageError(
                "FullyShardedDataParallel keeps shards of flat parameters, so that ranks would skip different steps; "
                "use bf16, which needs no loss scale (dtype=torch.bfloat16, --dtype bf16), or fully_shard"
            )
        # A checkpoint runs passes of its own within, whose leaves are known only then.
        checkpoints = any("Checkpoint" in node.name() for node in nodes)
        if not sharded and not checkpoints and owners.keys().isdisjoint(map(id, leaves)):
            return None
        running = ScaledPass(
            self._scaler,
            owners,
            largest_scale(roots),
            keeps=guards,
            retained=self._retained,
            # The inf of one rank is to be seen by all.
            cleans=not shared,
            now=self._passes.now,
        )
        for guard in sharded:
            # Its shards are not what the pass reaches: gradients are reduced onto them.
            running.concern(guard)
        running.take(leaves, nodes)
        for root in roots:
            self._optimizers.watch.loss_scaled(root, running.scale)
        return running

    def _join(
        self, running: ScaledPass, run: Callable[[Any, Any], None], roots: list[Any], given: list[Any], inputs: Any
    ) -> None:
        """Run a pass within a pass, such as a checkpoint's: given gradients have the scale, an implied 1 has not."""
        if given and len(given) != len(roots):
            run(roots, given)
            return
        gradients = []
        for root, gradient in zip(roots, given or [None] * len(roots), strict=True):
            implied = gradient is None and can_begin_at(root, None)
            gradients.append(scaled_gradients([root], [], running.scale)[0] if implied else gradient)
        running.take(*reached_by(roots, inputs), within=True)
        with self._passes.claimed(running, roots):
            run(roots, gradients)

    def _is_ours(self, roots: Sequence[Any], given: Sequence[Any]) -> bool:
        """Tell whether to scale a pass. Not one that torch refuses: then the program gets torch's own error."""
        return (
            self._scaler.checks
            and self.yielded_to is None
            and not open_blocks.count
            and not torch.compiler.is_compiling()
            and (not given or len(given) == len(roots))
            and all(map(can_begin_at, roots, given or [None] * len(roots)))
        )

    # -- what the program sees of it --

    def _around_retain_grad(self, original: Any) -> Any:
        def retain_grad(self_: Tensor) -> None:
            original(self_)
            if not self_.is_leaf:
                self._retained[self_] = None

        return retain_grad

    def _around_register(self, kind: type[Hook]) -> Callable[[Any], Any]:
        def around(original: Any) -> Any:
            def register(self_: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
                # A tensor subclass comes by twice, on its way through __torch_function__.
                if callable(hook) and not is_ours(hook) and not torch.compiler.is_compiling():
                    hook = self._seeing_true(kind, hook, self_ if isinstance(self_, Tensor) else None)
                return original(self_, hook, *args, **kwargs)

            return register

        return around

    def _around_register_for_all(self, original: Any) -> Any:
        def register(hook: Any) -> Any:
            return original(self._seeing_true(GradientHook, hook, None) if callable(hook) else hook)

        return register

    def _seeing_true(self, kind: type[Hook], hook: Any, tensor: Tensor | None) -> Hook:
        return kind(hook, self._passes, lambda: self._optimizers.casts.switched(False), tensor)


def _afterwards(original: Any, notice: Callable[[Any], None]) -> Any:
    """Return a replacement of a method that calls ``notice(self)`` after it."""

    def replacement(self_: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self_, *args, **kwargs)
        if not torch.compiler.is_compiling():
            notice(self_)
        return result

    return replacement
