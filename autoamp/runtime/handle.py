"""The handle: what users hold of patched torch, its loss scaling and its diagnostics. Its settings may disable it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.auto_scaling import AutoScale
from autoamp.casting import CastCache
from autoamp.diagnostics import (
    CastTrace,
    Counts,
    Explanation,
    Observer,
    Overflow,
    RangeProfile,
    Recording,
    Watch,
    explain,
    explain_step,
    report_of,
    write_report,
    write_scalars,
)
from autoamp.errors import UsageError
from autoamp.kernels import Backend, backend
from autoamp.modules import ModuleCasts, Override
from autoamp.rules import CastRule, CastTable
from autoamp.runtime.runtime import Runtime, kind_of
from autoamp.runtime.settings import Settings
from autoamp.scaling import LossScaler, RequestedGroup, is_count, make_scaler
from autoamp.stepping import clip_grad_norm_, listed, stepped_params, wrap_optimizer

__all__ = ["BaseHandle", "Handle", "NoOpHandle", "Precision", "runtime_of"]

Precision = Literal["fp32", "fp16", "none"]
"""What `override` runs a module in."""


class BaseHandle:
    """Patched torch, and the loss scaling that goes with it. There is one active handle at a time.

    `init`, `current_handle` and ``with autoamp.region(...)`` are annotated to return it. It is a `Handle`, or a
    `NoOpHandle` where autoamp is disabled: code runs unchanged with ``enabled=False``.
    """

    def __init__(self, settings: Settings, *, on: bool = True, scalers: Sequence[LossScaler] | None = None) -> None:
        self._runtime = Runtime(settings, self, on=on, scalers=scalers)

    @property
    def settings(self) -> Settings:
        """What it was made with: ``dtype``, ``device_type``, ``table`` of rules and the rest."""
        return self._runtime.settings

    def __repr__(self) -> str:
        """Tell what it casts, where, by which lists, and how training goes."""
        settings, scalers = self.settings, self._runtime.optimizers.scalers
        if not settings.enabled:
            return "<autoamp.NoOpHandle not active: nothing is cast or scaled>"
        # The scale may be known to the device alone: repr() waits for it, as `loss_scale` does.
        scales = ", ".join(f"{scaler.loss_scale:g}" for scaler in scalers)
        lists = sorted({rule.origin.path for rule in settings.table.rules})
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
        """Tell whether this handle's patches are in place."""
        return self._runtime.is_active()

    def deactivate(self) -> tuple[str, ...]:
        """Restore torch, the optimizers and the modules. Every patched attribute is again the object it was.

        Returns:
            The names that somebody else patched on top, which are left as they are.
        """
        return self._runtime.deactivate()

    @property
    def skipped_rules(self) -> tuple[CastRule, ...]:
        """Rules of shipped list sets on ops that this torch lacks."""
        return self._runtime.skipped_rules

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """What the last skipped steps came from, the last 1000 at most; empty without ``trace_overflow=True``."""
        trace = self._runtime.overflows
        return () if trace is None else tuple(trace.all)

    @property
    def late_bound(self) -> tuple[str, ...]:
        """Names that other modules had taken from torch before ``init()``, and that were rebound."""
        return self._runtime.late_bound

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
        return self._runtime.observe(observer)

    def count(self) -> Counts:
        """Count the calls of listed functions and what is cast for them, from now on. Costs microseconds a call.

        Returns:
            The numbers, which ends the counting: ``stop()``, or the end of a ``with`` statement. `deactivate` does too.

        Raises:
            UsageError: The handle is not active.
        """
        run = self._runtime
        run.check_active()
        if run.counts is None or not run.counts.active:
            run.counts = Counts(run.casts, run.observe_no_more)
            self.observe(run.counts)
        return run.counts

    def trace(self, *, profile: bool = False) -> CastTrace:
        """Trace casts within a ``with`` statement: by op and place what was cast, what was spared, in which dtypes.

        Results are those without, bit for bit. ``print(trace)`` is a table with hints; there are ``to_dict``,
        ``to_json`` and ``to_csv``.

        Args:
            profile: Whether torch.profiler takes times as well.

        Raises:
            UsageError: The handle is not active.
        """
        return self._runtime.trace(profile=profile)

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
        run = self._runtime
        run.check_active()

        def pass_scale() -> float:
            scales = run.auto_scaling is not None and run.auto_scaling.scales_pass()
            return self.loss_scale if scales else 1.0

        return RangeProfile(
            run.casts, run.observation, self.observe, lambda: self.loss_scale, pass_scale=pass_scale, every=every,
            compare=compare,
        )  # fmt: skip

    def record(self, *, sample: bool = True, times: bool = True) -> Recording:
        """Record for `report` from now on: the loss scale and the skips always, casts and values of some steps.

        Steps 0 to 2, 10 to 12, 100 to 102, and three of each 1000 are looked at closely, from the first call of a
        model in which gradients are recorded. Such a look ends after 5,000 calls or 2 GiB of arguments, and all of them
        together take 2 s and a tenth of the time at most. No result changes.

        Args:
            sample: Whether any step is.
            times: Whether calls are timed in some of these.

        Returns:
            The recording, which ends it: ``stop()``, or the end of a ``with`` statement. `deactivate` does too.

        Raises:
            UsageError: The handle is not active.
        """
        run = self._runtime
        run.check_active()
        if run.recording is None or not run.recording.active:
            run.recording = Recording(run, sample=sample, times=times)
            (run.recording.start if self.settings.enabled else run.recording.stop)()
        return run.recording

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return what was recorded since `record`, as plain JSON values, and write it to a file.

        Args:
            path: ``.html`` or ``.htm`` for a page that holds all it needs; anything else gets JSON. None: no file.
                A disabled handle returns ``{}``, and writes no file.

        Raises:
            UsageError: The page needs ``pip install 'autoamp[report]'``, or the file cannot be written.
        """
        if not self.settings.enabled:
            return {}
        found = report_of(self._runtime)
        if path is not None:
            write_report(path, [found])
        return found

    def explain(self, name: str) -> Explanation:
        """Tell which rules of this handle's lists apply to an op, and in which file and line they stand.

        Args:
            name: Such as ``"softmax"``, ``"exp_"`` or ``"torch.nn.functional.softmax"``.

        Raises:
            UsageError: Torch has no op of this name, and no rule is on it.
        """
        return explain(self.settings.table, name)

    # -- casts --

    @property
    def cache(self) -> CastCache:
        """The cache of parameter casts."""
        return self._runtime.casts.cache

    def disable_casts(self) -> contextlib.AbstractContextManager[None]:
        """Turn casts off within a ``with`` statement, on this thread."""
        return self._runtime.casts.switched(False, forced_off=True)

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
            raise UsageError(f"inference() takes a torch.nn.Module, not {kind_of(model)}")
        with self._runtime.casts.cache.pin(list(model.parameters())):
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
            raise UsageError(f"override() takes a torch.nn.Module, not {kind_of(module)}")
        if precision is None:
            return self._runtime.precisions.override_paths(module)
        return self._runtime.precisions.override(module, precision)

    # -- master weights and loss scaling --

    def masters_from_model(self) -> None:
        """Set every fp32 master to its half parameter: for weights that were written through ``.data`` in mid-training.

        In a process group of several processes all of a master is read, so that masters are equal where weights are;
        elsewhere elements that agree with their rounded master keep its low bits.
        """
        for guard in self._runtime.optimizers.guards:
            if guard.masters is not None:
                guard.masters.read_model()

    @property
    def backend(self) -> Backend:
        """What does the work of a step on this handle's type of device: compiled kernels, or torch's own functions."""
        settings = self.settings
        return backend(settings.device_type) if settings.enabled else Backend("cpu", False, "autoamp is not enabled")

    @property
    def loss_scale(self) -> float:
        """The current scale of the first loss."""
        return self._runtime.loss_scale

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped because gradients overflowed."""
        return self._runtime.optimizers.counts.skipped

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped."""
        return self._runtime.optimizers.counts.last_skipped

    @property
    def last_overflow(self) -> Overflow | None:
        """What the last skipped step came from; None before the first, and without ``trace_overflow=True``."""
        return None if self._runtime.overflows is None else self._runtime.overflows.last

    @property
    def stats(self) -> dict[str, Any]:
        """How training goes, as plain JSON values; waits for the device where that alone knows of the last steps.

        ``loss_scale``; ``loss_scales`` and ``found_inf``, the number of overflows, of each loss; ``steps`` and
        ``skipped`` of all optimizers, the program's own `FP16_Optimizer` included; ``last_step_skipped``; ``casts``,
        what `count` counted, such as ``{"float32->float16": 5}``; ``overflows`` by kind, with ``trace_overflow=True``.
        """
        return self._runtime.stats

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
        if not self.settings.enabled:
            return lambda: None
        if not is_count(every, 1):
            raise UsageError(f"every={every!r} must be a whole number of 1 or more")
        if not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
            raise UsageError(f"log_to() cannot write to {kind_of(writer)}; give an object with add_scalar() or log()")

        def write() -> None:
            if self._runtime.optimizers.counts.all % every == 0:
                now = self.stats
                numbers = {name: float(now[name]) for name in ("loss_scale", "skipped")}
                write_scalars(writer, numbers, now["steps"])

        self._runtime.followers.after_all.append(write)
        self._runtime.tell_followers()
        return functools.partial(self._runtime.followers.forget, write)

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
        end = self._runtime.followers.follow(followers)
        self._runtime.tell_followers()
        return end

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
        run = self._runtime
        run.check_active()
        if not self.settings.enabled:
            return None
        if run.optimizers.rehearsal is not None:
            raise UsageError("explain_overflow() was called within a step that is being explained; call it outside")
        trace, auto_scale = run.overflows, run.auto_scaling
        if auto_scale is not None:
            auto_scale.pause()
        if trace is not None:
            trace.recorder.paused = True
        own = run.optimizers.counts.own
        scale = run.loss_scale if own is None else own.loss_scale
        try:
            with run.observation.unobserved():
                return explain_step(step_fn, run.casts, scale, functools.partial(setattr, run.optimizers, "rehearsal"))
        finally:
            if trace is not None:
                trace.recorder.paused = False
            if auto_scale is not None:
                auto_scale.resume()

    @property
    def max_consecutive_skips(self) -> int:
        """After so many skipped steps of one optimizer in a row `NonFiniteGradientsError` is raised; 50 by default."""
        return self._runtime.optimizers.max_consecutive_skips

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, count: int) -> None:
        if not is_count(count, 1):
            raise UsageError(f"max_consecutive_skips={count!r} must be a whole number of 1 or more")
        self._runtime.optimizers.max_consecutive_skips = count

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
        self._runtime.check_active()
        scalers = self._runtime.optimizers.loss_scalers
        if not self.settings.enabled or scalers.is_off(optimizers):
            return contextlib.nullcontext(loss)
        if scalers.has_own:
            raise UsageError("after wrap_optimizer() use `with optimizer.scale_loss(loss)`, not handle.scale_loss")
        return self._runtime.optimizers.scaled(loss, optimizers, scalers.choose(loss_id, optimizers), delay_unscale)

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
        self._runtime.check_active()
        if not self.settings.enabled:
            params = [param for optimizer in listed(optimizers) for param in stepped_params(optimizer)]
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        return clip_grad_norm_(self._runtime.optimizers, optimizers, max_norm, norm_type)

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
        if not self.settings.enabled:
            return
        named = None if optimizers is None else listed(optimizers)
        self._runtime.optimizers.asked.put(RequestedGroup.of(group, replicas), named)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give an optimizer a ``scale_loss(loss)`` of its own, with a scaler for each of ``num_loss`` losses.

        Between two steps the first call scales the first loss, the second call the second, and so on.

        Returns:
            The optimizer itself.

        Raises:
            UsageError: The handle is not active, ``num_loss`` is no number of losses, or this is no optimizer.
        """
        self._runtime.check_active()
        if not self.settings.enabled:
            optimizer.scale_loss = _unscaled
            return optimizer
        if not is_count(num_loss, 1):
            raise UsageError(f"num_loss={num_loss!r} must be a whole number of 1 or more")
        scalers = [make_scaler(self.settings.loss_scale, self.settings.dtype) for _ in range(num_loss)]
        return wrap_optimizer(self._runtime.optimizers, optimizer, scalers)

    def auto_scale(self) -> AutoScale:
        """Scale every ``loss.backward()`` of the program from now on, and skip the steps that overflow.

        For code that knows nothing of loss scaling: gradients have true values wherever it can see them. It serves
        every `torch.optim.Optimizer` of the process, those that are there and those to come.

        Returns:
            What ends it: ``stop()``, or the end of a ``with`` statement. `deactivate` does too. That of a disabled
            handle was not started.

        Raises:
            UsageError: The handle is not active, or its optimizers step master weights.
        """
        run = self._runtime
        run.check_active()
        if run.auto_scaling is None or not run.auto_scaling.active:
            scaler = run.optimizers.loss_scalers.choose(0)
            # Who scales its losses by torch's own means casts by them too.
            auto_scaling = AutoScale(run.optimizers, scaler, on_aside=run.leave_to)
            if not self.settings.enabled:
                return auto_scaling
            run.auto_scaling = auto_scaling.start()
            if isinstance(run.casts, ModuleCasts) and run.casts.left_to is not None:
                run.auto_scaling.stand_aside(run.casts.left_to)
        return run.auto_scaling

    # -- checkpoints --

    def state_dict(self) -> dict[str, Any]:
        """Return the scalers' state: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``, and skips.

        ``{}`` where the handle is disabled.
        """
        optimizers = self._runtime.optimizers
        return {} if not self.settings.enabled else optimizers.loss_scalers.state_dict(optimizers.counts.skipped)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; all of it, or nothing. A disabled handle ignores it.

        Raises:
            CheckpointError: A key is missing, unknown or of the wrong kind. The message names it.
        """
        if self.settings.enabled:
            self._runtime.optimizers.load_state_dict(state)


class Handle(BaseHandle):
    """A handle that casts and scales: ``isinstance(handle, autoamp.Handle)`` tells whether anything is cast."""


class NoOpHandle(BaseHandle):
    """What ``init(enabled=False)`` returns: a handle whose settings say that it is disabled."""

    def __init__(self) -> None:
        super().__init__(Settings("cpu", torch.float16, CastTable(), loss_scale=1.0, enabled=False))


@contextlib.contextmanager
def _unscaled(loss: Any, *, delay_unscale: bool = False) -> Iterator[Any]:
    yield loss


def runtime_of(handle: BaseHandle) -> Runtime:
    """Return what a handle drives, for the parts of the package that set it up."""
    return handle._runtime
