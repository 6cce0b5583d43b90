"""The handle: what users hold of patched torch, its loss scaling and its diagnostics; and the disabled handle."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from autoamp.auto_scaling import AutoScale
from autoamp.diagnostics import (
    CastTrace,
    Consistency,
    ConsistencyCheck,
    Counts,
    Explanation,
    Followers,
    Observer,
    Overflow,
    RangeProfile,
    ReportRecording,
    Watch,
    explain,
    report_of,
    write_report,
    write_scalars,
)
from autoamp.errors import UsageError, kind_of
from autoamp.kernels import Backend
from autoamp.program import listen
from autoamp.rules import CastTable
from autoamp.runtime.runtime import Runtime
from autoamp.runtime.settings import Settings
from autoamp.runtime.training import TrainingHandle
from autoamp.scaling import is_count
from autoamp.stepping import Step, as_list, stepped_params


class BaseHandle(TrainingHandle):
    """Patched torch, and the loss scaling that goes with it. There is one active handle at a time.

    `init` and ``with autoamp.region(...)`` return it: a `Handle`, or a `NoOpHandle` if autoamp is disabled. Code runs
    unchanged with ``enabled=False``.
    """

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """What the last 1000 explained skips came from. With ``trace_overflow=True`` every skip is explained."""
        return tuple(self._runtime.overflows.all)

    def observe(self, observer: Observer) -> Watch:
        """Report each call of a patched function to an observer. Several observers can be active at once.

        Starting the first observer and stopping the last one installs the replacements again, which takes tens of
        milliseconds. In between each call costs a few microseconds more. Compiled code is not observed.

        Args:
            observer: An `autoamp.diagnostics.Observer`.

        Returns:
            An object whose ``stop()`` ends the observation; also a context manager. `deactivate` ends it too.

        Raises:
            UsageError: The handle is not active, or ``observer`` is not an observer.
        """
        return self._active_runtime.observation.observe(observer)

    def count(self) -> Counts:
        """Count the calls of listed functions and the casts of their arguments. Costs some microseconds per call.

        Returns:
            The counts. Their ``stop()`` ends the counting; also a context manager. `deactivate` ends it too.

        Raises:
            UsageError: The handle is not active.
        """
        run = self._active_runtime
        if run.call_counts is None or not run.call_counts.active:
            run.call_counts = Counts(run.observation)
            run.observation.observe(run.call_counts)
        return run.call_counts

    def trace(self) -> CastTrace:
        """Trace the casts inside a ``with`` statement: for each op and line the casts, the spared casts and the dtypes.

        Results are bitwise the same as without a trace, but for code that takes another kernel while a
        `TorchDispatchMode` is active: packed weights in `inference`, and cuDNN's recurrent layers. ``print(trace)``
        shows a table. The trace also has ``to_dict`` and ``to_json``.

        Raises:
            UsageError: The handle is not active.
        """
        return CastTrace(self._active_runtime.observation)

    def profile_ranges(self) -> RangeProfile:
        """Profile the ranges of values inside a ``with`` statement. Casts are off in this thread meanwhile.

        Results are bitwise those of fp32. ``print(ranges)`` shows a table and a verdict on fp16 and bf16. The profile
        also has ``to_dict`` and ``to_json``.

        Raises:
            UsageError: The handle is not active.
        """
        return RangeProfile(self._active_runtime.observation, lambda: self.loss_scale)

    def record(self, *, sample: bool = True) -> ReportRecording:
        """Record for `report`: the loss scale and the skips of all steps, casts and values of sampled steps.

        Steps 0, 10 and 100, and each 1000th are sampled. A sample starts at the first model call that records
        gradients. It ends with the step, or after 5,000 calls of listed functions. What half precision loses without an
        inf is looked for in steps 1, 4, 16, 64 and so on of each optimizer. No result changes.

        Args:
            sample: Whether to sample steps.

        Returns:
            The recording. Its ``stop()`` ends it; also a context manager. `deactivate` ends it too.

        Raises:
            UsageError: The handle is not active.
        """
        run = self._active_runtime
        if run.recording is None or not run.recording.active:
            run.recording = run.new_recording(sample=sample).start()
        return run.recording

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return the recording since `record` as plain JSON values, and write it to a file.

        Args:
            path: ``.html`` or ``.htm`` for a self-contained page, any other name for JSON, None for no file. A disabled
                handle returns ``{}`` and writes no file.

        Raises:
            UsageError: Nothing was recorded, Jinja2 is not installed for a page, or the file cannot be written.
        """
        found = report_of(self._runtime.recording, self._runtime.nonfinite, self.settings.rules_in_force)
        if path is not None:
            write_report(path, found)
        return found

    def explain(self, name: str) -> Explanation:
        """Return the rules of this handle's lists that apply to an op, with their files and lines.

        Args:
            name: Such as ``"softmax"``, ``"exp_"`` or ``"torch.nn.functional.softmax"``.

        Raises:
            UsageError: torch has no op of this name, and no rule names it.
        """
        return explain(self.settings.rules_in_force, name)

    def consistency(self, model: Module, *inputs: Any, backend: Any = "inductor", **named_inputs: Any) -> Consistency:
        """Compare what a model computes on each path with what it computes in training.

        The training pass is a call with gradients on. The other paths are both kinds of checkpoint, `torch.no_grad`,
        `torch.inference_mode`, ``model.eval()``, `inference`, a thread as of DataParallel, and `torch.compile`. Each
        path has the same inputs, random states and buffers. Of eager paths the first call with another dtype is named,
        or else the first with other bits; of ``eval()`` and compiled code, dtypes alone are compared.

        What the calls write to tensors, random generators and attributes of modules is undone, and no gradient is
        touched. Files, globals and numpy arrays that ``forward`` writes to are not restored, and torch.compile keeps
        the code that it made. A checkpoint is around the whole model.

        Args:
            model: The model, in the mode in which it trains. One that `torch.compile` returned is unwrapped.
            inputs: What it is called with.
            backend: That of `torch.compile`; None to leave compiled code out.
            named_inputs: What it is called with by name.

        Raises:
            UsageError: The handle is not active, or ``model`` is not a module, or ``model.compile()`` was called.
        """
        if not isinstance(model, Module):
            raise UsageError(f"consistency() takes a torch.nn.Module, not {kind_of(model)}")
        # What torch.compile returned has the model that it was given.
        model = getattr(model, "_orig_mod", model)
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise UsageError(
                f"consistency() compiles the model itself, and this {type(model).__name__} is compiled by "
                "model.compile(); pass one that is not"
            )
        run = self._active_runtime
        check = ConsistencyCheck(model, inputs, named_inputs, run.precisions, run.overflows, self.inference)
        return check.run(backend)

    @property
    def last_overflow(self) -> Overflow | None:
        """What the last explained skip came from, or None. With ``trace_overflow=True`` every skip is explained."""
        return self._runtime.overflows.last

    @property
    def stats(self) -> dict[str, Any]:
        """How training goes, as plain JSON values; waits for the device where that alone knows of the last steps.

        ``loss_scale``; ``loss_scales`` and ``found_inf``, the number of overflows, of each loss; ``steps`` and
        ``skipped`` of all optimizers, the program's own `FP16_Optimizer` included; ``last_step_skipped``;
        ``nonfinite``, the steps that no loss scale guards and whose gradients or loss held inf or nan; ``casts``, what
        `count` counted, such as ``{"float32->float16": 5}``; ``overflows`` by kind, as far as they were explained.
        """
        run, counts = self._runtime, self._runtime.optimizers.step_stats
        run.nonfinite.catch_up()
        # Waits for the device: only then scalers know of the last steps.
        skipped = counts.skipped
        # Scalers of a handle that guards no optimizer say nothing.
        scalers = [*(run.optimizers.scalers if run.optimizers.guards or not counts.own else ()), *counts.own]
        return {
            "loss_scale": counts.loss_scale(self.loss_scale),
            "loss_scales": [scaler.loss_scale for scaler in scalers],
            "found_inf": [scaler.overflows for scaler in scalers],
            "steps": counts.all,
            "skipped": skipped,
            "last_step_skipped": self.last_step_skipped,
            "nonfinite": run.nonfinite.total,
            "casts": {} if run.call_counts is None else run.call_counts.as_dict()["casts"],
            "overflows": dict(Counter(found.kind for found in run.overflows.all)),
        }

    def postfix(self) -> dict[str, str]:
        """Return a dict for ``tqdm.set_postfix``: the loss scale and the skipped steps."""
        now = self.stats
        return {"scale": f"{now['loss_scale']:g}", "skipped": str(now["skipped"])}

    def log_to(self, writer: Any, every: int = 10) -> Callable[[], None]:
        """Write the loss scale, steps and skips after each ``every``-th step. Returns a function that stops it.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`, a run of Weights & Biases, or an object with
                ``add_scalar`` or ``log`` like theirs.
            every: A number of steps. Reading the scale may wait for the device, so the default is not 1.

        Raises:
            UsageError: The writer has neither method, or ``every`` is not a whole number of 1 or more.
        """
        if not is_count(every, 1):
            raise UsageError(f"every={every!r} must be a whole number of 1 or more")
        if not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
            raise UsageError(f"log_to() cannot write to {kind_of(writer)}; give an object with add_scalar() or log()")

        def write() -> None:
            if self._runtime.optimizers.step_stats.all % every == 0:
                now = self.stats
                write_scalars(writer, {name: float(now[name]) for name in ("loss_scale", "skipped")}, now["steps"])

        return self._runtime.followers.add(write, after_skips=True)

    def follow(self, *followers: Any) -> Callable[[], None]:
        """Step schedulers or averages of weights after each optimizer step that was not skipped.

        This includes steps of an optimizer inside `FP16_Optimizer`. For most optimizers the host decides about a skip,
        and following costs nothing. A fused or capturable optimizer on a GPU decides on the device. Then each step
        waits for the device, which it would not do otherwise. Without a loss scale (bf16 with scale 1) no step is
        skipped, and nothing waits.

        Args:
            followers: Objects with ``step()`` or ``update()``, or functions. They are called without arguments, in
                this order, after the parameters were updated.

        Returns:
            A function that stops it.

        Raises:
            UsageError: One of them cannot be called like this.
        """
        return self._runtime.followers.follow(followers)

    def explain_overflow(self, step_fn: Callable[[], Any]) -> Overflow | None:
        """Compute a loss and its gradients, and return the first overflow.

        The gradients are those at the current loss scale. The function is called once. Random generators, attributes
        of modules, and all tensors that it wrote to are restored afterwards. Gradients of parameters are not touched.
        ``trace_overflow`` is not needed.

        Args:
            step_fn: Computes the loss and returns it, unscaled, as a tensor with one element. It runs neither a
                backward pass nor an optimizer.

        Returns:
            The first overflow; None if there is none.

        Raises:
            UsageError: The handle is not active, or ``step_fn`` returns no such loss, scales it, runs its backward pass
                or calls an optimizer.
        """
        run = self._active_runtime
        return run.overflows.explain_loss(step_fn, run.optimizers.step_stats.loss_scale(self.loss_scale))


class Handle(BaseHandle):
    """An enabled handle: ``isinstance(handle, autoamp.Handle)`` is true if autoamp casts."""


class NoOpHandle(BaseHandle):
    """The handle that ``init(enabled=False)`` returns. It casts nothing and scales nothing."""

    def __init__(self) -> None:
        super().__init__(Settings("cpu", torch.float16, CastTable(), loss_scale=1.0))
        self._listening = contextlib.ExitStack()

    @property
    def _active_runtime(self) -> Runtime:
        return self._runtime

    def __repr__(self) -> str:
        return "<autoamp.NoOpHandle not active: nothing is cast or scaled>"

    def deactivate(self) -> tuple[str, ...]:
        """Call the functions of `follow` no more."""
        self._listening.close()
        return super().deactivate()

    def record(self, *, sample: bool = True) -> ReportRecording:
        """Return a recording that has ended."""
        recording = self._runtime.recording = self._runtime.new_recording(sample=sample)
        recording.stop()
        return recording

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return ``{}``, and write no file."""
        return {}

    @property
    def backend(self) -> Backend:
        """None: torch's own functions compute optimizer steps."""
        return Backend("cpu", False, "autoamp is not enabled")

    @property
    def stats(self) -> dict[str, Any]:
        """The keys of an enabled handle, without any loss."""
        return {**super().stats, "loss_scales": [], "found_inf": []}

    def log_to(self, writer: Any, every: int = 10) -> Callable[[], None]:
        """Write nothing."""
        return lambda: None

    def follow(self, *followers: Any) -> Callable[[], None]:
        """Step schedulers or averages of weights after each step of an optimizer of torch: none is skipped."""
        calls = Followers()
        calls.follow(followers)
        listening = listen(optimizer_returned=lambda *_: calls.step_ended(Step()))
        return self._listening.enter_context(listening).close

    def explain_overflow(self, step_fn: Callable[[], Any]) -> Overflow | None:
        """Return None."""

    def scale_loss(
        self, loss: Tensor, optimizers: Any, loss_id: int = 0, *, delay_unscale: bool = False
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Yield the unchanged loss."""
        return contextlib.nullcontext(loss)

    def clip_grad_norm_(self, optimizers: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` does, and return the norm before that."""
        params = [param for optimizer in as_list(optimizers) for param in stepped_params(optimizer)]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def sync_over(self, group: Any, *, replicas: int | None = None, optimizers: Any = None) -> None:
        """Do nothing: no step is skipped."""

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Give an optimizer a ``scale_loss(loss)`` that yields the unchanged loss, and return the optimizer."""
        optimizer.scale_loss = lambda loss, delay_unscale=False: contextlib.nullcontext(loss)
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
