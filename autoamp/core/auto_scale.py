"""Loss scaling for programs that know nothing of it, and what stands around all backward passes and optimizer steps.

``loss.backward()`` scales, and gradients come out unscaled. The scale goes in with the gradient of the root, so the
graph is the program's own, and comes out of each gradient where it arrives at a leaf. What was found there goes as one
verdict to the guards of the optimizers that step the leaves. Around a step it is seen whether a guard missed it, and
gradients that are clipped are looked at.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from autoamp.core.attach import ScalesItself, guard_before, living_optimizers_and_modules, stepped_params, takes_flag
from autoamp.core.backward_pass import (
    GradientHook,
    Hook,
    OurHook,
    PostAccumulateHook,
    RunningPasses,
    ScaledPass,
    can_begin_at,
    reached_by,
    scaled_gradients,
)
from autoamp.core.block import open_blocks
from autoamp.core.gradients import is_flat, is_sharded, several_processes
from autoamp.core.guard import StepGuard
from autoamp.core.loss_scale import LossScaler, is_same_scale
from autoamp.core.masters import all_masters, before_pass
from autoamp.core.optimizers import Guards
from autoamp.core.steps import Step
from autoamp.errors import UsageError, warn_user
from autoamp.tensors import iter_tensors
from autoamp.torch_private import REGION_OF_GRAPH, TELLS_GRAPH_TASKS, current_graph_task

log = logging.getLogger(__name__)

# What torch's DistributedDataParallel says of a half parameter that has an fp32 gradient.
_REDUCER_REFUSES = re.compile("Expected (Half|BFloat16), got Float")
_CLEAR_FIRST = (
    "autoamp: this pass adds to gradients that another block or pass has left on half parameters of a "
    "DistributedDataParallel, in fp32. Clear these before it, as by zero_grad() of the critic's optimizer before the "
    "generator's loss is run backward, or wrap the model in autoamp.parallel.DistributedDataParallel"
)


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

    def __init__(self, optimizers: Guards) -> None:
        self._optimizers = optimizers
        # By identity, since tensors compare by element.
        self._retained = WeakTensorKeyDictionary()
        self._passes = RunningPasses(lambda: optimizers.casts.switched(False))
        self._yielded_to: str | None = None
        self._made_scaler = self._used_scaler = False
        self.active = False

    def start(self) -> AutoScale:
        """Hear backward passes, and guard the optimizers that are there.

        Raises:
            UsageError: An optimizer steps master weights, or this torch does not number its backward passes.
        """
        if not TELLS_GRAPH_TASKS:
            raise UsageError(
                f"auto_scale() needs torch._C._current_graph_task_id, and torch {torch.__version__} has none; use "
                "scale_loss, or bf16, which needs no loss scale"
            )
        if self._optimizers.has_masters:
            raise UsageError("auto_scale() is for fp32 models, and an optimizer has master weights; use scale_loss")
        self._scaler = self._optimizers.loss_scalers.choose(0)
        # What an earlier training used says nothing of the next one.
        self._yielded_to = None
        self.active = True
        self._optimizers.sites.update()
        self.guard_all()
        return self

    def guard_all(self) -> None:
        """Guard the optimizers that are there."""
        for optimizer in living_optimizers_and_modules()[0]:
            self.optimizer_made(optimizer)

    def stop(self) -> None:
        """Scale nothing any more. The optimizers stay guarded, for verdicts that their next step is to read."""
        self.active = False
        self._optimizers.sites.update()

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

    def optimizer_made(self, optimizer: Any) -> None:
        """Guard an optimizer."""
        # An FP16_Optimizer guards the optimizer within it, which is told of again as it loads a state, and a half-built
        # optimizer has no groups.
        if (
            self.active
            and not isinstance(optimizer, ScalesItself)
            and guard_before(optimizer) in (None, self._optimizers.guard_of(optimizer))
        ):
            with contextlib.suppress(AttributeError):
                if optimizer.param_groups:
                    self._optimizers.guard(optimizer, check=False).repeats_closure = False

    def scaler_made(self, scaler: torch.amp.GradScaler) -> None:
        """Note that the program has a scaler."""
        # A scaler that is half built cannot tell yet.
        with contextlib.suppress(AttributeError):
            self._made_scaler = self._made_scaler or (self.active and scaler.is_enabled())

    def loss_scaled(self, scaler: torch.amp.GradScaler, outputs: Any) -> None:
        """Yield to a scaler of the program.

        Args:
            scaler: What has scaled a loss.
            outputs: The loss, or a container of losses.
        """
        if self.active and scaler.is_enabled():
            self._used_scaler = True
            self.yield_to("torch.amp.GradScaler")

    def autocast_entered(self, region: torch.autocast) -> None:
        """Yield to a region in which the program trains; not to one for an evaluation, or for another device."""
        if (
            self.active
            and not torch.compiler.is_compiling()
            and not isinstance(region, REGION_OF_GRAPH)
            and region.device == self._optimizers.casts.device_type
            # Not where the casts go on, or the region is disabled.
            and self._optimizers.casts.autocast_rules()
            and torch.is_grad_enabled()
        ):
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

    def around_backward(self, original: Any) -> Any:
        """Return a function that scales a pass, if it is one to scale."""

        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            roots = _listed(tensors)
            if not (self.active or self._passes.by_run):
                original(roots, grad_tensors, retain_graph, create_graph, grad_variables=grad_variables, inputs=inputs)
                return
            inputs, grad_tensors, grad_variables = (
                None if given is None else _listed(given) for given in (inputs, grad_tensors, grad_variables)
            )
            given = (grad_tensors if grad_variables is None else grad_variables) or []
            run = functools.partial(original, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
            outer = running = self._passes.enclosing_pass()
            if len(given) not in (0, len(roots)):
                # The program gets torch's own error.
                running = None
            elif outer is not None:
                outer.take(*reached_by(roots, inputs), within=True)
            elif not create_graph and self._is_ours(roots, given):
                # Kept here for as long as the pass runs: guards refer to their optimizers weakly.
                optimizers = [one for guard in self._optimizers.guards if (one := guard.optimizer) is not None]
                running = self._begin(optimizers, roots, inputs)
            if running is None:
                run(roots, grad_tensors, grad_variables=grad_variables)
                return
            try:
                with self._passes.claimed(running, roots):
                    run(roots, scaled_gradients(roots, given, running.scale, within=outer is not None))
            finally:
                if outer is None:
                    running.close()
                    self._passes.end(running)

        return backward

    def _begin(self, optimizers: list[Any], roots: list[Any], inputs: Any) -> ScaledPass | None:
        """Make the pass that begins at the roots; None if it reaches nothing that one of the optimizers steps."""
        owners: dict[int, list[StepGuard]] = {}
        sharded: list[StepGuard] = []
        for guard in map(self._optimizers.guard, optimizers):
            params = guard.grads.params()
            for param in params:
                owners.setdefault(id(param), []).append(guard)
            if any(type(param) is not Parameter and is_sharded(param) for param in params):
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
        # In fp16 a power of 2 below the end of its range.
        largest = 2.0**15 if any(root.dtype is torch.float16 for root in roots) else math.inf
        scale = min(self._scaler.loss_scale, largest)
        # The inf of one rank is to be seen by all.
        running = ScaledPass(self._scaler, scale, not shared, owners, self._retained, self._passes.now)
        for guard in sharded:
            # Its shards are not what the pass reaches: gradients are reduced onto them.
            running.concern(guard)
        running.take(leaves, nodes)
        for root in roots:
            self._optimizers.steps.note(root, running.scale, waits=True)
        return running

    def _is_ours(self, roots: Sequence[Any], given: Sequence[Any]) -> bool:
        """Whether to scale a pass. Not one that cannot begin: then the program gets torch's own error."""
        return (
            self.active
            and self._scaler.checks
            and self.yielded_to is None
            and not open_blocks.count
            and not torch.compiler.is_compiling()
            and all(map(can_begin_at, roots, given or [None] * len(roots)))
        )

    # -- what the program sees of it --

    def grad_retained(self, tensor: Tensor) -> None:
        """Note a tensor whose gradient is to be true."""
        if self.active and not tensor.is_leaf:
            self._retained[tensor] = None

    def hook_registered(self, hook: Any, tensor: Tensor | None, *, accumulated: bool) -> Any:
        """Return a hook that gets true gradients.

        Args:
            hook: The hook that the program registers.
            tensor: The tensor that it is registered at; None for a module, or for all modules.
            accumulated: Whether it is called with the tensor, after the gradient was added to its ``.grad``.
        """
        # A tensor subclass comes by twice, on its way through __torch_function__.
        if not self.active or not callable(hook) or isinstance(hook, (OurHook, Hook)) or torch.compiler.is_compiling():
            return hook
        kind = PostAccumulateHook if accumulated else GradientHook
        return kind(hook, self._passes, tensor)


def _listed(values: Any) -> list[Any]:
    """Return tensors as torch's ``backward`` takes them: one, or any iterable of them."""
    return [values] if isinstance(values, (Tensor, torch.autograd.graph.GradientEdge)) else list(values)


class OptimizerSteps:
    """Stands around all backward passes and optimizer steps while the handle is active; looks at what clips gradients.

    Args:
        optimizers: Those of the handle, with their guards.
        auto_scaling: Guards optimizers that it has not met before.
    """

    def __init__(self, optimizers: Guards, auto_scaling: AutoScale) -> None:
        self._auto_scaling = auto_scaling
        self._optimizers = optimizers
        self._warned_of_clipping = False

    def optimizer_made(self, optimizer: Any) -> None:
        """Give a new optimizer masters, if it gets some."""
        if self._optimizers.casts.enabled:
            self._optimizers.optimizer_made(optimizer)

    def around_backward(self, original: Any) -> Any:
        """Return what stands for `torch.autograd.backward`: it gets masters ready, and notes losses nobody scales.

        A pass that is to be scaled begins with gradients that `AutoScale` has multiplied: it is around this.
        """
        optimizers = self._optimizers

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            compiling: bool = torch.compiler.is_compiling()
            # In this order: Dynamo reads no set of weak references.
            if compiling or all_masters.data:
                before_pass()
            # A pass within a pass is a checkpoint's.
            if compiling or current_graph_task() != -1:
                return original(tensors, grad_tensors, *args, **kwargs)
            if optimizers.steps.waiting:
                optimizers.steps.waiting -= 1
            else:
                for root in iter_tensors(tensors):
                    if root.grad_fn is not None and root.is_floating_point():
                        optimizers.steps.note(root, 1.0)
            try:
                if not optimizers.listeners.backward_begun:
                    return original(tensors, grad_tensors, *args, **kwargs)
                with contextlib.ExitStack() as stack:
                    for hear in optimizers.listeners.backward_begun:
                        stack.enter_context(hear((grad_tensors, kwargs.get("grad_variables"))))
                    return original(tensors, grad_tensors, *args, **kwargs)
            except RuntimeError as error:
                if all_masters.data and _REDUCER_REFUSES.match(str(error)):
                    error.add_note(_CLEAR_FIRST)
                raise

        return self._auto_scaling.around_backward(backward)

    def around_step(self, step: Any) -> Any:
        """Return a step that the optimizer's guard, if it has one, takes or skips."""
        compiling = torch.compiler.is_dynamo_compiling

        @functools.wraps(step)
        def guarded_step(self_: Any, *args: Any, **kwargs: Any) -> Any:
            # Somebody may have kept this replacement.
            if not self._optimizers.casts.enabled or compiling() or id(self_) in self._optimizers.running:
                return step(self_, *args, **kwargs)
            return self._step(step, self_, args, kwargs)

        return guarded_step

    def around_state_made(self, make: Any) -> Any:
        """Return what makes the state without a step that counts, and refuses optimizers of masters.

        torch looks the tensors that are stepped up among the model's parameters, and would load half values.
        """

        @functools.wraps(make)
        def make_state(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._optimizers.casts.enabled:
                return make(optimizer, *args, **kwargs)
            guard, running = guard_before(optimizer), self._optimizers.running
            if guard is not None and guard.masters is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} steps fp32 masters, and the model has half parameters: "
                    "torch.distributed.checkpoint.state_dict does not find one by the other. Save and load "
                    "autoamp.DistributedState(model, optimizer), which has the keys of get_optimizer_state_dict with "
                    "flatten_optimizer_state_dict=True; its state_dict() and load_state_dict() do without files"
                )
            running[id(optimizer)] = threading.get_ident(), optimizer
            try:
                with contextlib.nullcontext() if guard is None else guard.uncounted():
                    return self._optimizers.casts.thread.with_mode(make, False)(optimizer, *args, **kwargs)
            finally:
                running.pop(id(optimizer), None)

        return make_state

    def _step(self, original: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step of any optimizer with casts off; through its guard, if the call went past that."""
        optimizers = self._optimizers
        guard = optimizers.guard_of(optimizer)
        plain_step: Step | None = None
        counts = False
        # An FP16_Optimizer has a guard that is none of the handle's, and so has the optimizer inside of it.
        if guard is None and not isinstance(optimizer, ScalesItself) and guard_before(optimizer) is None:
            # Nobody has told of it if ``gc.freeze()`` had frozen it.
            self._auto_scaling.optimizer_made(optimizer)
            guard = optimizers.guard_of(optimizer) or _guard_around(optimizers.guards, optimizer)
            if guard is None and callable(args[0] if args else kwargs.get("closure")):
                # Now: when the closure scales the first loss, the step has begun already.
                guard = optimizers.guard(optimizer)
            if guard is None:
                # Without loss scaling. Its gradients may be scaled all the same.
                optimizers.still_scaled.refuse(f"{type(optimizer).__name__} would use", stepped_params(optimizer))
                plain_step, counts = Step(), not optimizers.steps_within(optimizer)
                if counts:
                    optimizers.steps.begin(plain_step, guarded=False)
                optimizers.check_underflow(optimizer)

        def run(*args: Any, **kwargs: Any) -> Any:
            optimizers.running[id(optimizer)] = threading.get_ident(), optimizer
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                optimizers.running.pop(id(optimizer), None)

        if guard is not None:
            return guard.step(run, args, kwargs)
        result = None
        if plain_step is not None and optimizers.steps.refuses(optimizer, None):
            plain_step.skipped_by = "on_nonfinite"
        else:
            result = optimizers.casts.thread.with_mode(run, False)(*args, **kwargs)
        if plain_step is not None and counts:
            optimizers.steps.plain += 1
            optimizers.steps.end(plain_step)
        optimizers.casts.cache.clear()
        return result

    def clips_gradients(self, function: str, params: Iterable[Tensor]) -> None:
        """Refuse to clip gradients that a block left scaled; warn once of clipping within or between blocks."""
        left = self._optimizers.still_scaled
        scaled = [guard for guard in self._optimizers.guards if _is_scaled(guard)]
        if not left.any_noted and (not scaled or self._warned_of_clipping):
            return
        params = list(params)
        if function == "get_total_norm":
            given = set(map(id, params))
            leaves = (leaf for guard in scaled for leaf in guard.grads.leaves())
            params = [leaf for leaf in (*left.params(), *leaves) if id(leaf.grad) in given]
        left.refuse(f"{function} would {'use' if function == 'get_total_norm' else 'clip'}", params)
        clipped = set(map(id, params))
        for guard in () if self._warned_of_clipping else scaled:
            if not clipped.isdisjoint(map(id, guard.grads.leaves())):
                self._warned_of_clipping = True
                warn_user(
                    f"{function} was called inside the scale_loss block of {guard.name}, or after one with "
                    "delay_unscale=True, where gradients are multiplied by the loss scale: it clips nearly everything. "
                    "Call it after the with block of the last loss, which has no delay_unscale, before optimizer.step()"
                )
                return


def _is_scaled(guard: StepGuard) -> bool:
    grads = guard.grads
    return (guard.in_block or grads.delayed is not None) and not is_same_scale(grads.scale, 1.0)


def _guard_around(guards: Iterable[StepGuard], optimizer: Any) -> StepGuard | None:
    """Return the guard that stands for an optimizer without one: its checks and masters are of the same parameters.

    A wrapper such as SAM was given to ``scale_loss`` and steps the optimizer within it outside of its own step. At a
    loss scale of 1.0 there are no checks, and masters have to be copied down all the same. An optimizer that takes
    found_inf on its device would not get it there, so the guard of one is passed over.
    """
    for guard in guards:
        has_part = guard.grads.checks or guard.masters is not None
        if has_part and not guard.stepping and not takes_flag(guard.optimizer):
            params = set(map(id, guard.grads.params()))
            if all(id(param) in params for param in stepped_params(optimizer)):
                return guard
    return None
