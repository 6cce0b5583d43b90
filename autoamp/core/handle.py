"""The handle, what it drives, and the disabled handle.

A handle has patches of torch, casts, models that were set up, precisions of modules, guarded optimizers with their loss
scales, and checkpoints of these.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.core.attach import stepped_params
from autoamp.core.auto_scale import AutoScale, OptimizerSteps
from autoamp.core.block import UnscaledBlock
from autoamp.core.casts import CastCache, CastState
from autoamp.core.half_models import CastModels
from autoamp.core.loss_scale import LossScaler, as_list, is_count, make_scaler
from autoamp.core.nonfinite import NonFiniteSteps
from autoamp.core.optimizers import Guards, LossBlock, wrap_optimizer
from autoamp.core.patch_sites import Parts
from autoamp.core.patched_torch import PatchedTorch
from autoamp.core.ranks import RequestedGroup
from autoamp.core.rules import CastRule, CastTable
from autoamp.core.scope import AutocastRegions, ModuleCalls, ScopedCasts
from autoamp.core.settings import ModulePrecisions, Override, Settings
from autoamp.errors import UsageError, kind_of
from autoamp.kernels import Backend, backend

suspended: list[Callable[[], object]] = []
"""Called when the patches of the active handle are about to be taken back, for a while or for good."""


class Looks:
    """What looks on at one handle: here nothing does."""

    def begin(self, runtime: Runtime) -> None:
        """Look on at a handle, or at the casts that it has got anew."""

    def end(self) -> None:
        """Torch was restored for good."""


class Runtime:
    """The state of a handle: the patches of torch, the casts, and the models and optimizers that were set up.

    Attributes:
        settings: The settings of the handle.
        precisions: Which modules run in a precision of their own.
        models: The models that it set up: those in half precision, and those whose inputs or outputs are cast.
        optimizers: The optimizers that it guards, and the loss scalers.
        patched: The patches of torch.
        ended: Whether ``deactivate`` was called. A suspended runtime may be activated again.
        setups: What `initialize` keeps of the call that set up each model, in the order of the calls.
        nonfinite: Checks steps without a loss scale.
        looks: What looks on.
        auto_scaling: What `Handle.auto_scale` starts.
    """

    def __init__(self, settings: Settings, looks: Looks, *, on: bool, scalers: Sequence[LossScaler] | None) -> None:
        self.precisions = ModulePrecisions()
        self.models = CastModels()
        self.optimizers = Guards(
            _casts_for(settings, on), scalers or [make_scaler(settings.loss_scale, settings.dtype)]
        )
        self.optimizers.facts = lambda: (self.settings.facts(), self.settings.rules())
        self.auto_scaling = AutoScale(self.optimizers)
        self.patched = PatchedTorch(self.optimizers)
        self.looks = looks
        self._apply(settings)
        self.ended = False
        self.setups: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()

    def _apply(self, settings: Settings) -> None:
        self.settings = settings
        self.precisions.use(settings.table.modules)
        self.nonfinite = NonFiniteSteps(self.optimizers, settings.on_nonfinite)
        calls = ModuleCalls(self.casts, self.precisions, self.models.boundaries, self.optimizers.listeners)
        self.optimizers.sites.parts = Parts(
            calls,
            self.models,
            AutocastRegions(self.casts, goes_on=settings.half_table is None),
            OptimizerSteps(self.optimizers, self.auto_scaling),
            self.auto_scaling,
            self.nonfinite,
        )
        self.optimizers.undoes_steps = settings.on_nonfinite != "warn"
        self.optimizers.steps.refuses, self.optimizers.steps.after = self.nonfinite.refuses_step, calls.step_ended
        self.looks.begin(self)

    @property
    def casts(self) -> CastState:
        """The casting state."""
        return self.optimizers.casts

    def active(self) -> Runtime:
        """Return it. UsageError: the patches are not in place."""
        if not self.patched.in_place:
            raise UsageError("this handle is not active; call autoamp.init() and use the handle that it returns")
        return self

    def suspend(self) -> tuple[str, ...]:
        """Restore torch and keep the rest, so that ``activate`` can go on where this handle stopped."""
        if not self.patched.in_place:
            return ()
        for listener in suspended.copy():
            listener()
        for closed in self.optimizers.listeners.closed:
            closed()
        return self.patched.restore()

    def deactivate(self) -> tuple[str, ...]:
        """Restore torch, the optimizers and the modules. Every patched attribute is again the object it was.

        Returns:
            The names that somebody else patched on top, which are left as they are.
        """
        try:
            # What is told of steps at the end may be a warning, which a filter makes an error.
            return self._end_looks()
        finally:
            self.ended = True
            self.precisions.undo_all()
            self.optimizers.release()
            self.models.let_go()

    def _end_looks(self) -> tuple[str, ...]:
        """End what looks on, and auto scaling; restore torch."""
        if self.auto_scaling.active:
            self.auto_scaling.stop()
        foreign = self.suspend()
        self.looks.end()
        return foreign

    def grow(self, settings: Settings, models: Sequence[Module], optimizers: Sequence[Any], *, on: bool) -> None:
        """Prepare for another call of `initialize`. Torch is restored until the handle is activated again.

        Args:
            settings: What all calls agree on, from now on.
            models: The models of the new call. The setup of those that an earlier call set up is undone.
            optimizers: Its optimizers.
            on: Whether casts act everywhere.
        """
        self._end_looks()
        named = {module for model in models for module in model.modules()}
        # Models that an earlier call has cast and that have a module in common with these are let go as a whole.
        cast = [model for model in self.setups if self.models.boundaries.get(model) is not None]
        modules = named.union(*(model.modules() for model in cast if not named.isdisjoint(model.modules())))
        # Parameters that these share with another half model stay half.
        shared = {id(param) for model in self.models.halves if model not in modules for param in model.parameters()}
        params = {id(param): param for module in modules for param in module.parameters(recurse=False)}
        self.precisions.undo_all(modules)
        self.optimizers.let_go(optimizers, [param for key, param in params.items() if key not in shared])
        self.models.let_go(modules)
        self.optimizers.casts = _casts_for(settings, on)
        self._apply(settings)
        self.optimizers.models_with_masters.clear()


def _casts_for(settings: Settings, on: bool) -> CastState:
    kind = functools.partial(CastState, on=on) if settings.scope == "global" else ScopedCasts
    return kind(settings.dtype, settings.device_type, enable_caching=settings.enable_caching)


_Model = TypeVar("_Model", bound=Module)
Precision = Literal["fp32", "fp16", "half", "none"]
"""What `override` runs a module in."""


class BaseHandle:
    """Patched torch, and the loss scaling that goes with it. There is one active handle at a time.

    `init` and ``with autoamp.region(...)`` return it: a `Handle`, or a `NoOpHandle` if autoamp is disabled. Code runs
    unchanged with ``enabled=False``.
    """

    make_looks: type[Looks] = Looks
    """Makes what looks on at a handle of this class."""

    def __init__(self, settings: Settings, *, on: bool = True, scalers: Sequence[LossScaler] | None = None) -> None:
        self._runtime = Runtime(settings, self.make_looks(), on=on, scalers=scalers)

    @property
    def settings(self) -> Settings:
        """The settings of the handle: ``dtype``, ``device_type``, the ``table`` of rules and others."""
        return self._runtime.settings

    def __repr__(self) -> str:
        """Tell what it casts, where, by which lists, and how training goes."""
        settings, scalers = self.settings, self._runtime.optimizers.scalers
        # The scale may be known to the device alone: repr() waits for it, as `loss_scale` does.
        scales = ", ".join(f"{scaler.loss_scale:g}" for scaler in scalers)
        lists = sorted({rule.origin.path for rule in settings.rules_in_force.rules})
        level = f"opt_level={settings.opt_level!r}, " if settings.opt_level else ""
        return (
            f"<autoamp.Handle {'active' if self.is_active() else 'not active'}: {level}{settings.dtype} on "
            f"{settings.device_type}, lists={lists}, loss_scale={scales}, skipped_steps={self.skipped_steps}>"
        )

    # A handle belongs to the process: a copy of what refers to it refers to the same one.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a handle cannot be pickled: it belongs to the process that patched torch; save its state_dict(), and call "
            "init() or initialize() in the other process"
        )

    # -- lifecycle --

    def is_active(self) -> bool:
        """Whether this handle's patches are in place."""
        return self._runtime.patched.in_place

    def deactivate(self) -> tuple[str, ...]:
        """Restore torch, the optimizers and the modules. Every patched attribute is again the original object.

        Returns:
            The names that another library patched after autoamp. They are not restored.
        """
        return self._runtime.deactivate()

    def __enter__(self) -> Self:
        """Return the handle. The end of the ``with`` statement deactivates it: ``with autoamp.init() as handle``."""
        self._runtime.active()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.deactivate()

    @property
    def skipped_rules(self) -> tuple[CastRule, ...]:
        """The rules of shipped list sets for ops that the installed torch lacks."""
        return self._runtime.patched.skipped_rules

    @property
    def late_bound(self) -> tuple[str, ...]:
        """The names that other modules imported from torch before ``init()``, and that ``init()`` rebound."""
        return self._runtime.patched.patches.late_bound

    # -- casts --

    @property
    def cache(self) -> CastCache:
        """The cache of parameter casts."""
        return self._runtime.casts.cache

    def disable_casts(self) -> contextlib.AbstractContextManager[None]:
        """Turn casts off within a ``with`` statement, on this thread."""
        return self._runtime.casts.switched(False, forced_off=True)

    @contextlib.contextmanager
    def inference(self, model: _Model) -> Iterator[_Model]:
        """Keep the casts of a model's weights inside a ``with`` statement. Do not change the weights meanwhile.

        If gradients are not recorded, each parameter is cast once, at its first use. On a CPU with bf16 units the cast
        is kept in oneDNN's own layout. A write to a weight inside the block has no effect on its cast. The casts take
        about half the memory of the fp32 weights.

        Args:
            model: The model.

        Raises:
            UsageError: ``model`` is not a module.
        """
        if not isinstance(model, Module):
            raise UsageError(f"inference() takes a torch.nn.Module, not {kind_of(model)}")
        with self._runtime.casts.cache.pin(list(model.parameters())):
            yield model

    def override(self, module: Module, precision: Precision | None = None) -> Override:
        """Run a module, and everything that it calls, in its own precision, in forward and backward.

        Args:
            module: The module. Without ``precision``: the model to which the path patterns of the lists apply.
            precision: ``"fp32"``: floating inputs are cast to fp32, and no op inside is cast. ``"fp16"``: inputs are
                cast to the half dtype in use and the lists apply inside, even within an ``"fp32"`` module. ``"none"``:
                inputs keep their dtypes, and no op inside is cast. ``"half"`` is another word for ``"fp16"``.

        Returns:
            An object with ``undo()``, which is also a context manager.

        Raises:
            UsageError: ``module`` is not a module or was cast to half at O2 or O3, or the precision is unknown.
        """
        if not isinstance(module, Module):
            raise UsageError(f"override() takes a torch.nn.Module, not {kind_of(module)}")
        if precision is None:
            return self._runtime.precisions.override_paths(module)
        if self._runtime.models.is_half(module):
            raise UsageError(
                f"override({type(module).__name__}, {precision!r}) is for fp32 weights, and initialize() has cast this "
                f'model to half; name the module in initialize(..., lists={{"modules": {{"path": {precision!r}}}}})'
            )
        return self._runtime.precisions.override(module, precision)

    # -- master weights and loss scaling --

    def masters_from_model(self) -> None:
        """Set every fp32 master to its half parameter. Call it after writing to weights through ``.data``.

        With one process, elements whose rounded master equals the parameter keep the low bits of the master. With
        several processes all elements are copied, so that masters are equal on ranks with equal weights.
        """
        for guard in self._runtime.optimizers.guards:
            if guard.masters is not None:
                guard.masters.read_model()

    def model_from_masters(self) -> None:
        """Set every half parameter to its fp32 master. Call it after writing to masters through ``.data``.

        A step does so by itself, and so does a module's call after a write that torch records.
        """
        for guard in self._runtime.optimizers.guards:
            if guard.masters is not None:
                guard.masters.round_into_model()

    @property
    def backend(self) -> Backend:
        """What computes optimizer steps on this handle's device type: compiled kernels, or torch's own functions."""
        return backend(self.settings.device_type)

    @property
    def loss_scale(self) -> float:
        """The current scale of the first loss of the first call; ``stats["loss_scales"]`` has those of all."""
        return self._runtime.optimizers.scalers[0].loss_scale

    @property
    def skipped_steps(self) -> int:
        """How many steps of all optimizers were skipped because gradients overflowed."""
        return self._runtime.optimizers.steps.skipped

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped."""
        return self._runtime.optimizers.steps.last.skipped

    @property
    def max_consecutive_skips(self) -> int:
        """So many skipped steps of one optimizer in a row raise `NonFiniteGradientsError`; 50 by default."""
        return self._runtime.optimizers.max_consecutive_skips

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, count: int) -> None:
        if not is_count(count, 1):
            raise UsageError(f"max_consecutive_skips={count!r} must be a whole number of 1 or more")
        self._runtime.optimizers.max_consecutive_skips = count

    def scale_loss(
        self, loss: Tensor, optimizers: Any = None, loss_id: int = 0, *, delay_unscale: bool = False
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Scale a loss for its backward pass. At the end of the block unscale the gradients and check them.

        The block may add to gradients of earlier blocks. If gradients overflowed, the next ``optimizer.step()`` is
        skipped.

        Args:
            loss: A floating tensor, usually a scalar.
            optimizers: The optimizer or optimizers whose gradients the loss contributes to, or ``[]``. If at the end
                of the block any of their gradients holds inf or nan, the next step of each of them is skipped. An
                overflow in an earlier block concerns the optimizers of that block alone.
            loss_id: Which scaler to use.
            delay_unscale: Leave the gradients scaled until a later call without it, or until the step.

        Returns:
            A context manager that yields ``loss.float() * scale``; the unchanged loss if the handle is disabled.

        Raises:
            UsageError: The handle is not active, or ``wrap_optimizer`` was used.
        """
        guarded = self._runtime.active().optimizers
        scalers = guarded.loss_scalers
        if scalers.own:
            raise UsageError("after wrap_optimizer() use `with optimizer.scale_loss(loss)`, not handle.scale_loss")
        return LossBlock(guarded, loss, optimizers, scalers.choose(loss_id, optimizers), delay_unscale)

    def clip_grad_norm_(self, optimizers: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down in place so that their total norm is at most ``max_norm``.

        Call it after the ``scale_loss`` block, or after the backward pass, and before the step. If ranks hold shards or
        pipeline stages, the norm is that over all ranks. It uses the collective of the step, so every rank that takes
        part in that must call this. Nothing is read from the device.

        Args:
            optimizers: The optimizer or optimizers whose gradients are clipped.
            max_norm: The highest norm. Gradients are multiplied by ``max_norm / (norm + 1e-6)`` if that is below 1.
            norm_type: The p of the p-norm, above 0; ``inf`` is the largest absolute value.

        Returns:
            The norm before clipping, a tensor without dimensions. If it is inf, finite gradients become 0, as with
            `torch.nn.utils.clip_grad_norm_`, also where the inf is in the gradients of another optimizer. An optimizer
            whose own gradients hold inf or nan is skipped.

        Raises:
            UsageError: The handle is not active, a block is open, or ``norm_type`` is not above 0.
        """
        return self._runtime.active().optimizers.clip_grad_norm_(optimizers, max_norm, norm_type)

    def sync_over(self, group: Any, *, replicas: int | None = None, optimizers: Any = None) -> None:
        """Let all ranks of a process group skip the same steps and keep equal loss scales.

        Use it where the parameters do not show the group: stages of a pipeline, experts, parameters that only some
        ranks step. DTensors need no call. Each step then runs one small collective, and every rank of the group must
        take part in it.

        Args:
            group: The process group, such as ``torch.distributed.group.WORLD`` or ``mesh.get_group()``.
            replicas: How many of its ranks have the same parameters. `clip_grad_norm_` counts each parameter once. None
                for all ranks, 1 for stages of a pipeline.
            optimizers: The optimizer or optimizers; None for all.

        Raises:
            UsageError: There is no process group, this rank is not in it, or ``replicas`` does not divide its size.
        """
        named = None if optimizers is None else as_list(optimizers)
        self._runtime.optimizers.sync_over(RequestedGroup.from_arguments(group, replicas), named)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give an optimizer its own ``scale_loss(loss)``, with a scaler for each of ``num_loss`` losses.

        Between two steps the first call scales the first loss, the second call the second, and so on.

        Args:
            optimizer: The optimizer.
            num_loss: The number of losses between two steps.

        Returns:
            The optimizer itself.

        Raises:
            UsageError: The handle is not active, ``num_loss`` is below 1, or ``optimizer`` is not an optimizer.
        """
        guarded = self._runtime.active().optimizers
        if not is_count(num_loss, 1):
            raise UsageError(f"num_loss={num_loss!r} must be a whole number of 1 or more")
        scalers = [make_scaler(self.settings.loss_scale, self.settings.dtype) for _ in range(num_loss)]
        return wrap_optimizer(guarded, optimizer, scalers, self._runtime.active)

    def auto_scale(self) -> AutoScale:
        """Scale every ``loss.backward()`` of the program, and skip the steps that overflow.

        It is for code without loss scaling: wherever that code can read gradients, they are unscaled. It applies to
        every `torch.optim.Optimizer` of the process, existing or new.

        Returns:
            An object whose ``stop()`` ends it; also a context manager. `deactivate` ends it too. A disabled handle
            returns one that was not started.

        Raises:
            UsageError: The handle is not active, or its optimizers step master weights.
        """
        run = self._runtime.active()
        if not run.auto_scaling.active:
            run.auto_scaling.start()
        return run.auto_scaling

    # -- checkpoints --

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all loss scalers and the number of skipped steps.

        ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ..., "skipped_steps": int}``; ``{}`` if the handle
        is disabled.
        """
        optimizers = self._runtime.optimizers
        return optimizers.loss_scalers.state_dict(optimizers.steps.skipped)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``: all of it, or nothing after an error. A disabled handle ignores it.

        Args:
            state: That result.

        Raises:
            CheckpointError: A key is missing, unknown or of the wrong type. The message names it.
        """
        self._runtime.optimizers.load_state_dict(state)


class Handle(BaseHandle):
    """An enabled handle: ``isinstance(handle, autoamp.Handle)`` is true if autoamp casts."""


class NoOpHandle(BaseHandle):
    """The handle that ``init(enabled=False)`` returns. It casts nothing and scales nothing."""

    def __init__(self) -> None:
        super().__init__(Settings("cpu", torch.float16, CastTable(), loss_scale=1.0))

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return "<autoamp.NoOpHandle not active: nothing is cast or scaled>"

    @property
    def backend(self) -> Backend:
        """None: torch's own functions compute optimizer steps."""
        return Backend("cpu", False, "autoamp is not enabled")

    def scale_loss(
        self, loss: Tensor, optimizers: Any = None, loss_id: int = 0, *, delay_unscale: bool = False
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Yield the unchanged loss."""
        return UnscaledBlock(loss)

    def clip_grad_norm_(self, optimizers: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` does, and return the norm before that."""
        params = [param for optimizer in as_list(optimizers) for param in stepped_params(optimizer)]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def sync_over(self, group: Any, *, replicas: int | None = None, optimizers: Any = None) -> None:
        """Do nothing: no step is skipped."""

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give an optimizer a ``scale_loss(loss)`` that yields the unchanged loss, and return the optimizer."""
        optimizer.scale_loss = lambda loss, delay_unscale=False: UnscaledBlock(loss)
        return optimizer

    def auto_scale(self) -> AutoScale:
        """Return an object that was not started."""
        return self._runtime.auto_scaling

    def state_dict(self) -> dict[str, Any]:
        """Return ``{}``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


def runtime_of(handle: BaseHandle) -> Runtime:
    """Return what a handle drives, for the parts of the package that set it up."""
    return handle._runtime
