"""The handle: owns the patches of torch, the casts, the models that were set up, and the guarded optimizers."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoamp.auto_scaling import AutoScale
from autoamp.casting import CastCache, Casts
from autoamp.diagnostics import (
    CastTrace,
    Counts,
    Explanation,
    Followers,
    Observation,
    Observer,
    Overflow,
    OverflowTrace,
    RangeProfile,
    Recording,
    ValueProfile,
    Watch,
    explain,
    explain_step,
    report_of,
    write_report,
    write_scalars,
)
from autoamp.errors import UsageError
from autoamp.kernels import Backend, backend
from autoamp.modules import CastModels, ForwardDtypes, ModuleCasts, ModulePrecisions, Override
from autoamp.ops import Target, expand
from autoamp.rules import CastRule
from autoamp.runtime.events import activated, suspended
from autoamp.runtime.installation import Installation
from autoamp.runtime.protocol import Precision
from autoamp.runtime.settings import Settings, Setup
from autoamp.scaling import AskedGroup, LossScaler, is_count, make_scaler
from autoamp.stepping import GuardedOptimizers, Rehearsing, listed, stepped_params
from autoamp.tensors import HALF_DTYPES

__all__ = ["Handle"]

log = logging.getLogger(__name__)


class Handle:
    """Patched torch, and the loss scaling that goes with it. Made by `autoamp.init()`; there is one at a time.

    Attributes:
        casts: The casting state.
        precisions: Which modules run in a precision of their own.
        models: The models that it set up: those in half precision, and those whose inputs or outputs are cast.
        optimizers: The optimizers that it guards, and the loss scalers.
        skipped_rules: Rules of shipped list sets on ops that this torch lacks.
        ended: Whether ``deactivate`` was called; a handle that was only suspended may come back.
        setups: The calls of `initialize` that it serves, in their order.
        overflows: Explains skipped steps, with ``trace_overflow=True``; else None.
        recording: What `record` began last; None before.
    """

    def __init__(self, settings: Settings, *, on: bool = True, scalers: Sequence[LossScaler] | None = None) -> None:
        self.settings = settings
        what, caching = (settings.dtype, settings.device_type), settings.enable_caching
        if settings.scope == "modules":
            by_module = ModuleCasts(*what, enable_caching=caching)
            by_module.on_left = self._leave_scaling_to
            self.casts: Casts = by_module
        else:
            self.casts = Casts(*what, enable_caching=caching, on=on)
        self.precisions = ModulePrecisions(settings.table.modules)
        self.models = CastModels()
        self.optimizers = GuardedOptimizers(self.casts, scalers or [make_scaler(settings.loss_scale, settings.dtype)])
        self._followers = Followers()
        self._say_settings()
        self.skipped_rules: tuple[CastRule, ...] = ()
        self._installation: Installation | None = None
        self._step_hooks: list[Any] = []
        self._registered: list[Target] = []
        self._auto_scale: AutoScale | None = None
        self._observation = Observation(self.casts)
        self.overflows = OverflowTrace(self.casts, self._observation.unobserved) if settings.trace_overflow else None
        self.optimizers.watch = self.overflows
        self._counts: Counts | None = None
        self.recording: Recording | None = None
        self.ended = False
        self.setups: list[Setup] = []

    def __repr__(self) -> str:
        """Tell what it casts, where, by which lists, and how training goes."""
        settings, scalers = self.settings, self.optimizers.scalers
        # The scale may be known to the device alone: repr() waits for it, as `loss_scale` does.
        scales = ", ".join(f"{scaler.loss_scale:g}" for scaler in scalers)
        lists = sorted({rule.origin.path for rule in settings.table.rules})
        level = f"opt_level={settings.opt_level!r}, " if settings.opt_level else ""
        return (
            f"<autoamp.Handle {'active' if self.is_active() else 'not active'}: {level}{settings.dtype} on "
            f"{settings.device_type}, lists={lists}, loss_scale={scales}, skipped_steps={self.skipped_steps}>"
        )

    def _say_settings(self) -> None:
        self.optimizers.facts, self.optimizers.rules = self.settings.facts, self.settings.rules

    # -- lifecycle --

    def is_active(self) -> bool:
        """Tell whether this handle's patches are in place."""
        return self._installation is not None

    def activate(self, registered: tuple[Target, ...] = ()) -> None:
        """Put the patches in place. Where one fails torch is left as it was. Called by ``init`` and ``region``."""
        self._patch_torch(registered)
        self.ended = False
        try:
            activated.tell(self)
        except BaseException:
            self.suspend()
            raise

    def suspend(self) -> tuple[str, ...]:
        """Restore torch and keep the rest, so that ``activate`` can go on where this handle stopped."""
        if not self.is_active():
            return ()
        suspended.tell(self)
        if self.overflows is not None:
            self.overflows.close()
        return self._restore_torch()

    def install_anew(self) -> None:
        """Take the patches back and put them in place again, as the state of the handle asks for now."""
        if self.is_active():
            self._restore_torch()
            self._patch_torch(self._registered)

    def _patch_torch(self, registered: Sequence[Target]) -> None:
        expansion = expand(self.settings.table)
        installation = Installation(
            self.casts,
            self.precisions,
            self.models,
            allow_banned=self.settings.allow_banned,
            rebind=self.settings.rebind,
            observation=self._observation if self._observation.observers else None,
            met=self._meet if any(setup.masters for setup in self.setups) else None,
            loaded=self.optimizers.note_loaded if self.optimizers.scales else None,
            around_call=None if self.overflows is None else self.overflows.recorder.around,
        )
        self.casts.open()
        try:
            installation.install(expansion, tuple(registered))
        except BaseException:
            self.casts.shut()
            raise
        self._installation = installation
        self._registered = list(registered)
        self.skipped_rules = expansion.skipped
        self._step_hooks = [
            register_optimizer_step_pre_hook(self.optimizers.before_step),
            register_optimizer_step_post_hook(lambda *_: self.casts.cache.clear()),
        ]
        if isinstance(self.casts, ModuleCasts):
            note_step = self.casts.note_step
            self._step_hooks.append(register_optimizer_step_pre_hook(lambda *_: note_step()))
        if self._auto_scale is not None:
            self._auto_scale.resume()
        log.log(
            logging.INFO if self.settings.verbose else logging.DEBUG,
            "casting to %s on %s: %d targets patched, %d names rebound, %d rules skipped",
            self.settings.dtype, self.settings.device_type, len(expansion.targets), len(self.late_bound),
            len(self.skipped_rules),
        )  # fmt: skip

    def _restore_torch(self) -> tuple[str, ...]:
        installation, self._installation = self._installation, None
        if installation is None:
            # Another thread has restored it since.
            return ()
        if self._auto_scale is not None:
            self._auto_scale.pause()
        self.casts.shut()
        for hook in self._step_hooks:
            hook.remove()
        self.optimizers.end_steps()
        return installation.remove()

    def deactivate(self) -> tuple[str, ...]:
        """Restore torch, the optimizers and the modules. Every patched attribute is again the object it was.

        Returns:
            The names that somebody else patched on top, which are left as they are.
        """
        if self._auto_scale is not None:
            self._auto_scale.stop()
        if self.recording is not None:
            self.recording.stop()
        foreign = self.suspend()
        self._observation.end()
        self.ended = True
        self.precisions.undo_all()
        self.optimizers.release()
        self.models.restore()
        return foreign

    def inherit(self, before: Handle, setups: Sequence[Setup], models: Sequence[Module], optimizers: Any) -> None:
        """Take over what earlier calls of `initialize` set up, but for what is named again, which is let go.

        Args:
            before: The handle that served them, suspended.
            setups: The calls of which something is left. Where there are none the handle before is deactivated.
            models: Those that are named again, or were never set up.
            optimizers: So are these.
        """
        if not setups:
            before.deactivate()
            return
        if before._auto_scale is not None:
            before._auto_scale.stop()
        if before.recording is not None:
            before.recording.stop()
        before._observation.end()
        before.let_go(models, optimizers)
        before.ended = True
        self.precisions.join(before.precisions)
        self.models, self.optimizers, self.setups = before.models, before.optimizers, list(setups)
        self.optimizers.serve(self.casts, self._check_active)
        self.optimizers.watch, self._followers = self.overflows, before._followers
        self._say_settings()
        self.optimizers.masters_for_all = False
        self.optimizers.loss_scalers.forget_but(scaler for setup in setups for scaler in setup.scalers)
        before.models = CastModels()
        before.optimizers = GuardedOptimizers(before.casts, before.optimizers.scalers)

    def let_go(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        """Give these models, and the optimizers that step their parameters, back what they had."""
        named = [*models, *self.models.overlapping(models)]
        modules = {module for model in named for module in model.modules()}
        # What another model shares with these stays as that one wants it.
        shared = {id(param) for model in self.models.halves() if model not in modules for param in model.parameters()}
        params = {id(param): param for model in named for param in model.parameters() if id(param) not in shared}
        self.precisions.undo_within(modules)
        self.optimizers.let_go(optimizers, params.values())
        self.models.let_go(self.models.overlapping(models))

    def steps_halves(self, optimizer: Any) -> bool:
        """Tell whether all half parameters of an optimizer are of models whose level keeps no masters."""
        models = [model for setup in self.setups if not setup.masters for model in setup.models]
        without = {id(param) for model in models for param in model.parameters()}
        stepped = [param for param in stepped_params(optimizer) if param.dtype in HALF_DTYPES]
        return bool(stepped) and all(id(param) in without for param in stepped)

    def _meet(self, optimizer: Any) -> None:
        """Give an optimizer that was made after `initialize` masters, before anything is loaded into it."""
        models = [model for setup in self.setups if setup.masters for model in setup.models]
        theirs = {id(param) for model in models for param in model.parameters()}
        with contextlib.suppress(AttributeError):
            # A half-built optimizer has no groups.
            stepped = [param for param in stepped_params(optimizer) if param.dtype in HALF_DTYPES]
            if any(id(param) in theirs for param in stepped):
                self.optimizers.keep_masters(optimizer)

    def patch(self, target: Target) -> None:
        """Patch one more target while active."""
        if self._installation is not None:
            self._installation.add(target)
            self._registered.append(target)

    @property
    def late_bound(self) -> tuple[str, ...]:
        """Names that other modules had taken from torch before ``init()``, and that were rebound."""
        return self._installation.late_bound if self._installation is not None else ()

    # -- diagnostics --

    def observe(self, observer: Observer) -> Watch:
        """Tell an observer of each call of a patched function, from now on. Several may look on at once.

        The replacements are installed anew with the first, and again when the last goes, which takes tens of
        milliseconds; what goes on in between costs a few microseconds a call. What torch.compile compiles is not seen.

        Returns:
            What ends it: ``stop()``, or the end of a ``with`` statement. `deactivate` does too.

        Raises:
            UsageError: The handle is not active, or this is no observer.
        """
        self._check_active()
        if not isinstance(observer, Observer):
            raise UsageError(f"observe() takes an autoamp.diagnostics.Observer, not {_kind(observer)}")
        first = not self._observation.observers
        self._observation.add(observer)
        if first:
            self.install_anew()
        return Watch(lambda: self._observe_no_more(observer))

    def _observe_no_more(self, observer: Observer) -> None:
        if self._observation.remove(observer) and not self._observation.observers:
            self.install_anew()

    def count(self) -> Counts:
        """Count the calls of listed functions and what is cast for them, from now on. Costs microseconds a call.

        Returns:
            The numbers, which ends the counting: ``stop()``, or the end of a ``with`` statement. `deactivate` does too.

        Raises:
            UsageError: The handle is not active.
        """
        self._check_active()
        if self._counts is None or not self._counts.active:
            self._counts = Counts(self.casts, self._observe_no_more)
            self.observe(self._counts)
        return self._counts

    def trace(self, *, profile: bool = False) -> CastTrace:
        """Trace casts within a ``with`` statement: by op and place what was cast, what was spared, in which dtypes.

        Results are those without, bit for bit. ``print(trace)`` is a table with hints; there are ``to_dict``,
        ``to_json`` and ``to_csv``.

        Args:
            profile: Whether torch.profiler takes times as well.

        Raises:
            UsageError: The handle is not active.
        """
        self._check_active()
        return CastTrace(self.casts, self._observation, self.observe, profile=profile)

    def profile_ranges(self, *, every: int = 1, compare: int = 2) -> RangeProfile:
        """Profile the ranges of values within a ``with`` statement, in fp32: this thread casts nothing meanwhile.

        Results are those of fp32, bit for bit. ``print(ranges)`` is a table and a verdict on fp16 and bf16; there are
        ``to_dict`` and ``to_json``.

        Args:
            every: Look at the first of so many steps of optimizers; the others run at nearly full speed.
            compare: How many calls of each operator at each place are run again in both half dtypes, for their errors.

        Raises:
            UsageError: The handle is not active, or an argument is out of range.
        """
        self._check_active()
        return RangeProfile(
            self.casts, self._observation, self.observe, lambda: self.loss_scale, every=every, compare=compare
        )

    def look_at_values(self) -> ValueProfile:
        """Return what notes the exponents of values as they are computed, for a ``with`` statement: for `record`."""
        return ValueProfile(self.casts, self._observation, self.observe, lambda: self.loss_scale)

    def record(self, *, sample: bool = True, times: bool = True) -> Recording:
        """Record for `report` from now on: the loss scale and the skips always, casts and values of some steps.

        Steps 0 to 2, 10, 11, 100, 101, and two of each 1000 are looked at closely; those take some times as long. No
        result changes.

        Args:
            sample: Whether any step is.
            times: Whether torch.profiler takes times in some of these. It is left alone while the program uses it.

        Returns:
            The recording, which ends it: ``stop()``, or the end of a ``with`` statement. `deactivate` does too.

        Raises:
            UsageError: The handle is not active.
        """
        self._check_active()
        if self.recording is None or not self.recording.active:
            self.recording = Recording(self, sample=sample, times=times).start()
        return self.recording

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return what was recorded since `record`, as plain JSON values, and write it to a file.

        Args:
            path: ``.html`` or ``.htm`` for a page that holds all it needs; anything else gets JSON. None: no file.

        Raises:
            UsageError: The page needs ``pip install 'autoamp[report]'``, or the file cannot be written.
        """
        found = report_of(self)
        if path is not None:
            write_report(path, [found])
        return found

    def on_model(self, told: Callable[[], object] | None) -> None:
        """Call this before each outermost call of a module, while anything observes; None ends that."""
        self._observation.on_model = told

    def on_step(self, told: Callable[[], object]) -> Callable[[], None]:
        """Call this after each step of a guarded optimizer, skips included; return what ends that."""
        self._followers.after_all.append(told)
        self._tell_followers()
        return lambda: self._followers.after_all.remove(told)

    def explain(self, name: str) -> Explanation:
        """Tell which rules of this handle's lists apply to an op, and in which file and line they stand.

        Args:
            name: Such as ``"softmax"``, ``"exp_"`` or ``"torch.nn.functional.softmax"``.

        Raises:
            UsageError: Torch has no op of this name, and no rule is on it.
        """
        return explain(self.settings.table, name)

    @property
    def cache(self) -> CastCache:
        """The cache of parameter casts."""
        return self.casts.cache

    # -- casts --

    def disable_casts(self) -> contextlib.AbstractContextManager[None]:
        """Turn casts off within a ``with`` statement, on this thread."""
        return self.casts.switched(False, forced_off=True)

    @contextlib.contextmanager
    def inference(self, model: Module) -> Iterator[Module]:
        """Promise that the weights of ``model`` stay as they are, and keep their casts for a ``with`` statement.

        Where gradients are not recorded each parameter is cast once, at its first use, and on a CPU with bf16 units
        kept in the layout that oneDNN wants. A weight that is written to meanwhile, against the promise, goes unseen.
        Costs about half of the fp32 weights in memory.

        Raises:
            UsageError: This is no module.
        """
        if not isinstance(model, Module):
            raise UsageError(f"inference() takes a torch.nn.Module, not {_kind(model)}")
        with self.casts.cache.pin(list(model.parameters())):
            yield model

    def override(self, module: Module, precision: Precision | None = None) -> Override:
        """Run a module in a precision of its own, forward and backward, with all it calls.

        Args:
            module: The module. Without ``precision`` the model under which the list's path patterns are looked up.
            precision: ``"fp32"``: floating inputs go to fp32 and nothing is cast within. ``"fp16"``: inputs go to the
                half dtype and the lists hold within, also inside of an ``"fp32"`` module. ``"none"``: nothing is cast.

        Returns:
            An object with ``undo()``, which is also a context manager.

        Raises:
            UsageError: This is no module, or the precision is unknown.
        """
        if not isinstance(module, Module):
            raise UsageError(f"override() takes a torch.nn.Module, not {_kind(module)}")
        if precision is None:
            return self.precisions.override_paths(module)
        return self.precisions.override(module, precision)

    # -- models and optimizers in half precision --

    def set_up_model(
        self, model: Module, forward: ForwardDtypes, *, dtype: torch.dtype | None = None, keep_norms: bool = False
    ) -> None:
        """Cast a model in place, and what goes into it and comes out of it at each call.

        `initialize` calls this before the handle is activated, which puts the patches for it in place.
        """
        if dtype is not None:
            self.models.cast(model, dtype, keep_norms=keep_norms)
        self.models.set_forward_dtypes(model, forward)

    def keep_masters(self, optimizer: Any) -> None:
        """Let an optimizer step fp32 masters of its half parameters. `initialize` calls this."""
        self.optimizers.keep_masters(optimizer, self.models.originals)

    def step_halves(self, optimizer: Any) -> None:
        """Let an optimizer step half parameters themselves. `initialize` calls this."""
        self.models.step_halves(optimizer)
        self.optimizers.guard(optimizer, check=False)

    def masters_from_model(self) -> None:
        """Set every fp32 master to its half parameter: for weights that were written through ``.data`` in mid-training.

        In a process group of several processes all of a master is read, so that masters are equal where weights are;
        elsewhere elements that agree with their rounded master keep its low bits.
        """
        self.optimizers.read_model()

    # -- loss scaling --

    @property
    def backend(self) -> Backend:
        """What does the work of a step on this handle's type of device: compiled kernels, or torch's own functions."""
        return backend(self.settings.device_type)

    @property
    def loss_scale(self) -> float:
        """The current scale of the first loss."""
        return self.optimizers.scalers[0].loss_scale

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped because gradients overflowed."""
        return self.optimizers.skipped_steps

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped."""
        return self.optimizers.last_step_skipped

    @property
    def last_overflow(self) -> Overflow | None:
        """What the last skipped step came from; None before the first, and without ``trace_overflow=True``."""
        return None if self.overflows is None else self.overflows.last

    @property
    def stats(self) -> dict[str, Any]:
        """How training goes, as plain JSON values; waits for the device where that alone knows of the last steps.

        ``loss_scale``; ``loss_scales`` and ``found_inf``, the number of overflows, of each loss; ``steps`` and
        ``skipped`` of all optimizers, the program's own `FP16_Optimizer` included; ``last_step_skipped``; ``casts``,
        what `count` counted, such as ``{"float32->float16": 5}``; ``overflows`` by kind, with ``trace_overflow=True``.
        """
        kinds: dict[str, int] = {}
        for found in [] if self.overflows is None else self.overflows.all:
            kinds[found.kind] = kinds.get(found.kind, 0) + 1
        guarded, own = self.optimizers, self.optimizers.own
        # Catches up: scalers hear of steps no earlier than that.
        skipped = self.skipped_steps + (0 if own is None else own.skipped)
        # Scalers of a handle that guards no optimizer say nothing.
        scalers = [*(guarded.scalers if own is None or guarded.steps else []), *(() if own is None else own.losses)]
        return {
            "loss_scale": self.loss_scale if own is None else own.loss_scale,
            "loss_scales": [scaler.loss_scale for scaler in scalers],
            "found_inf": [scaler.overflows for scaler in scalers],
            "steps": guarded.all_steps,
            "skipped": skipped,
            "last_step_skipped": guarded.last_step_skipped,
            "casts": {} if self._counts is None else self._counts.as_dict()["casts"],
            "overflows": kinds,
        }

    def postfix(self) -> dict[str, str]:
        """Return what ``tqdm.set_postfix`` takes: the loss scale and the skips."""
        now = self.stats
        return {"scale": f"{now['loss_scale']:g}", "skipped": str(now["skipped"])}

    def log_to(self, writer: Any, every: int = 10) -> Callable[[], None]:
        """Write the loss scale, steps and skips after each ``every``-th step; return what ends that.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`, a run of Weights & Biases, or what has their
                ``add_scalar`` or ``log``.
            every: Reading the scale may wait for the device, so not at each step by default.

        Raises:
            UsageError: The writer is neither, or ``every`` is no number of steps.
        """
        if not is_count(every, 1):
            raise UsageError(f"every={every!r} is no number of steps; choose 1 or more")
        if not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
            raise UsageError(f"log_to() cannot write to {_kind(writer)}; give what has add_scalar() or log()")

        def write() -> None:
            if self.optimizers.all_steps % every == 0:
                now = self.stats
                numbers = {name: float(now[name]) for name in ("loss_scale", "skipped")}
                write_scalars(writer, numbers, now["steps"])

        self._followers.after_all.append(write)
        self._tell_followers()
        return functools.partial(self._followers.forget, write)

    def follow(self, *followers: Any) -> Callable[[], None]:
        """Step schedulers, averages and the like after steps that landed, and not after skips.

        Also those of an optimizer within `FP16_Optimizer`. Whether a step was a skip is asked at each step, right after
        it. Where the step was decided on the host, as for most optimizers, that is known and costs nothing. A fused or
        capturable optimizer on a GPU decides by a flag there: then each step waits for the device, which it would not
        do otherwise. Without a loss scale to check (bf16 with scale 1) nothing is skipped, and nobody waits.

        Args:
            followers: Objects with ``step()`` or ``update()``, or functions; called without arguments, in their order,
                once parameters are as the step left them.

        Returns:
            What ends it.

        Raises:
            UsageError: One of them cannot be stepped.
        """
        end = self._followers.follow(followers)
        self._tell_followers()
        return end

    def _tell_followers(self) -> None:
        self.optimizers.on_stepped = lambda skips: self._followers.stepped(lambda: skips is not None and skips.last)

    def explain_overflow(self, step_fn: Callable[[], Any]) -> Overflow | None:
        """Run a step of the program several times, and tell what overflows in it: at the present loss scale, at lower
        ones, and in fp32.

        Random generators, buffers and gradients are as before afterwards, and no optimizer steps. Needs no
        ``trace_overflow``.

        Args:
            step_fn: Computes the loss, and returns it or runs its backward pass as the program does: in ``scale_loss``,
                by ``FP16_Optimizer.backward``, or plainly. What follows an ``optimizer.step()`` in it is not run. Each
                call must do the same: it may draw random numbers, and must not fetch another batch.

        Returns:
            What overflows first; None where nothing does.

        Raises:
            UsageError: The handle is not active, or this is called within ``step_fn``.
        """
        self._check_active()
        if self.optimizers.rehearsal is not None:
            raise UsageError("explain_overflow() was called within a step that is being explained; call it outside")
        trace, auto_scale = self.overflows, self._auto_scale
        if auto_scale is not None:
            auto_scale.pause()
        if trace is not None:
            trace.recorder.paused = True
        own = self.optimizers.own
        scale = self.loss_scale if own is None else own.loss_scale
        try:
            with self._observation.unobserved():
                return explain_step(step_fn, self.casts, scale, self._rehearse)
        finally:
            if trace is not None:
                trace.recorder.paused = False
            if auto_scale is not None:
                auto_scale.resume()

    def _rehearse(self, rehearsal: Rehearsing | None) -> None:
        self.optimizers.rehearsal = rehearsal

    @property
    def max_consecutive_skips(self) -> int:
        """After so many skipped steps of one optimizer in a row `NonFiniteGradientsError` is raised; 50 by default."""
        return self.optimizers.max_consecutive_skips

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, count: int) -> None:
        if not is_count(count, 1):
            raise UsageError(f"max_consecutive_skips={count!r} is no number of steps; choose 1 or more")
        self.optimizers.max_consecutive_skips = count

    def scale_loss(
        self, loss: Tensor, optimizers: Any, loss_id: int = 0, *, delay_unscale: bool = False
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Scale a loss for its backward pass; at the end of the block unscale the gradients and check them.

        Gradients of earlier blocks may be there: they are added to. Whether the gradients overflowed is known to
        ``optimizer.step()``, which then skips.

        Args:
            loss: A floating tensor, as a rule a scalar.
            optimizers: The optimizer whose gradients the loss contributes to, several of them, or ``[]``. An
                overflow in this block skips the next step of all of them; one of an earlier block that of its own.
            loss_id: Which scaler to use.
            delay_unscale: Leave the gradients scaled until a later call without it, or until the step.

        Returns:
            A context manager over ``loss.float() * scale``; over the loss as it is for optimizers that `initialize`
            was given with ``enabled=False``.

        Raises:
            UsageError: The handle is not active, or ``wrap_optimizer`` was used.
        """
        self._check_active()
        scalers = self.optimizers.loss_scalers
        if scalers.is_off(optimizers):
            return contextlib.nullcontext(loss)
        if scalers.has_own:
            raise UsageError("after wrap_optimizer() use `with optimizer.scale_loss(loss)`, not handle.scale_loss")
        return self.optimizers.scaled(loss, optimizers, scalers.choose(loss_id, optimizers), delay_unscale)

    def clip_grad_norm_(self, optimizers: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down in place so that their norm, taken together, is at most ``max_norm``.

        Between the end of the block, or the backward pass, and the step. The norm is that of the whole gradients where
        ranks have shards or stages; ranks that agree on the step tell one another of it by the same collective, so all
        of them must call this. Nothing is read from the device.

        Args:
            optimizers: The optimizer whose gradients are meant, or several.
            max_norm: The highest norm. Gradients are multiplied by ``max_norm / (norm + 1e-6)`` where that is below 1.
            norm_type: The p of the p-norm, above 0; ``inf`` is the largest absolute value.

        Returns:
            The norm before clipping, a tensor without dimensions. Where it is inf or nan nothing was multiplied, and
            the step will be skipped.

        Raises:
            UsageError: The handle is not active, a block is open, or ``norm_type`` is not above 0.
        """
        self._check_active()
        return self.optimizers.clip(optimizers, max_norm, norm_type)

    def sync_over(self, group: Any, *, replicas: int | None = None, optimizers: Any = None) -> None:
        """Let all ranks of a process group agree on each step: they skip alike, and their loss scales stay equal.

        For what nothing tells of by itself: stages of a pipeline, experts, parameters that some ranks alone step.
        DTensors need no call. Each step is one small collective then, which every rank of the group must come to.

        Args:
            group: The process group, such as ``torch.distributed.group.WORLD`` or ``mesh.get_group()``.
            replicas: How many of its ranks have the same parameters, by which `clip_grad_norm_` counts each once; None
                for all of them, 1 for stages of a pipeline.
            optimizers: Those that are meant, or one; None for all.

        Raises:
            UsageError: There is no process group, this rank is not in it, or ``replicas`` does not divide its size.
        """
        named = None if optimizers is None else listed(optimizers)
        self.optimizers.sync_over(AskedGroup.of(group, replicas), named)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give an optimizer a ``scale_loss(loss)`` of its own, with a scaler for each of ``num_loss`` losses.

        Between two steps the first call scales the first loss, the second call the second, and so on.

        Returns:
            The optimizer itself.

        Raises:
            UsageError: The handle is not active, ``num_loss`` is no number of losses, or this is no optimizer.
        """
        self._check_active()
        if not is_count(num_loss, 1):
            raise UsageError(f"num_loss={num_loss!r} is no number of losses; choose 1 or more")
        scalers = [make_scaler(self.settings.loss_scale, self.settings.dtype) for _ in range(num_loss)]
        return self.optimizers.wrap(optimizer, scalers, self._check_active)

    def auto_scale(self) -> AutoScale:
        """Scale every ``loss.backward()`` of the program from now on, and skip the steps that overflow.

        For code that knows nothing of loss scaling: gradients have true values wherever it can see them. It serves
        every `torch.optim.Optimizer` of the process, those that are there and those to come.

        Returns:
            What ends it: ``stop()``, or the end of a ``with`` statement. `deactivate` does too.

        Raises:
            UsageError: The handle is not active, or its optimizers step master weights.
        """
        self._check_active()
        if self._auto_scale is None or not self._auto_scale.active:
            self._auto_scale = AutoScale(self.optimizers, self.optimizers.loss_scalers.choose(0)).start()
            if isinstance(self.casts, ModuleCasts) and self.casts.left_to is not None:
                self._auto_scale.stand_aside(self.casts.left_to)
        return self._auto_scale

    def leave_to(self, whom: str) -> None:
        """Take note that the program itself computes in half precision: with ``scope="modules"`` casts end for good."""
        if isinstance(self.casts, ModuleCasts):
            self.casts.leave_to(whom)

    def _leave_scaling_to(self, whom: str) -> None:
        if self._auto_scale is not None:
            self._auto_scale.stand_aside(whom)

    def _check_active(self) -> None:
        if not self.is_active():
            raise UsageError("this handle is not active; call autoamp.init() and use the handle that it returns")

    # -- checkpoints --

    def state_dict(self) -> dict[str, Any]:
        """Return the scalers' state: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``, and skips."""
        return self.optimizers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; all of it, or nothing.

        Raises:
            CheckpointError: A key is missing, unknown or of the wrong kind. The message names it.
        """
        self.optimizers.load_state_dict(state)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"
