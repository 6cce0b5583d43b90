"""What a handle offers to those who look on: counts, traces, ranges, recordings, explanations, monitors."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from autoamp.core import BaseHandle as CoreHandle
from autoamp.core import CastModels, Guards, Listeners, Looks, Runtime, Step, handles, is_count, listen, runtime_of
from autoamp.core import Handle as EnabledHandle
from autoamp.core import NoOpHandle as DisabledHandle
from autoamp.errors import UsageError, kind_of
from autoamp.tools.buffer_writes import BufferWrites
from autoamp.tools.capsule import CapsuleWriter
from autoamp.tools.casts import CastTrace, Counts
from autoamp.tools.consistency import Consistency, ConsistencyCheck
from autoamp.tools.dtype_notes import add_dtype_note
from autoamp.tools.explain import Explanation, explain
from autoamp.tools.half_losses import HalfLosses
from autoamp.tools.monitors import Followers, write_scalars
from autoamp.tools.observer import Observation, Observer, Watch
from autoamp.tools.overflow import OverflowTrace
from autoamp.tools.ranges import RangeProfile
from autoamp.tools.report.document import report_of
from autoamp.tools.report.page import write_report
from autoamp.tools.report.recording import ReportRecording
from autoamp.tools.verdicts import Overflow


class Diagnostics(Looks):
    """What looks on at one handle.

    Attributes:
        observation: The observers of patched functions.
        overflows: Explains skipped steps, all of them with ``trace_overflow=True``.
        half_losses: Looks for losses that make no inf, for more than this handle; None where a recording makes its own.
        recording: What `BaseHandle.record` began last; None before.
        call_counts: What `BaseHandle.count` began last; None before.
    """

    observation: Observation
    overflows: OverflowTrace
    _optimizers: Guards
    _models: CastModels

    def __init__(self) -> None:
        self.call_counts: Counts | None = None
        self.half_losses: HalfLosses | None = None
        self.recording: ReportRecording | None = None

    def begin(self, runtime: Runtime) -> None:
        """Look on at a handle, or at the casts that it has got anew."""
        listeners, settings = runtime.optimizers.listeners, runtime.settings
        if hasattr(self, "overflows"):
            listeners.remove(self.overflows.recorder)
            listeners.remove(self.overflows)
        self.observation = Observation(runtime.casts, listeners, runtime.patched.patch_anew)
        self.overflows = OverflowTrace(
            runtime.optimizers, self.observation, settings.rules_in_force.rules, always=settings.trace_overflow
        )
        if settings.capsule is not None:
            self.overflows.capsules = CapsuleWriter(settings.capsule)
        self._optimizers, self._models = runtime.optimizers, runtime.models
        runtime.casts.explain = functools.partial(add_dtype_note, runtime)

    def end(self) -> None:
        """Stop the recording, and end all observers: torch was restored for good."""
        if self.recording is not None:
            self.recording.stop()
        self.observation.end()

    @functools.cached_property
    def buffer_writes(self) -> BufferWrites:
        """Looks at buffers of half models while somebody records. It tells of each once."""
        return BufferWrites(self._models)

    @functools.cached_property
    def followers(self) -> Followers:
        """Functions that are called after steps of guarded optimizers."""
        return Followers(self._optimizers.listeners)

    def new_recording(self, *, sample: bool) -> ReportRecording:
        """Return a recording that has not begun; see `BaseHandle.record`."""
        half_losses = self.half_losses or HalfLosses()
        return ReportRecording(
            self._optimizers, self.overflows, self.followers, half_losses, self.buffer_writes, sample=sample
        )


class BaseHandle(CoreHandle):
    """The part of a handle that looks on, and changes nothing."""

    make_looks = Diagnostics

    @property
    def _looks(self) -> Diagnostics:
        return diagnostics_of(self)

    @property
    def _active_looks(self) -> Diagnostics:
        self._runtime.active()
        return diagnostics_of(self)

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """What the last 1000 explained skips came from. With ``trace_overflow=True`` every skip is explained."""
        return tuple(self._looks.overflows.all)

    def observe(self, observer: Observer) -> Watch:
        """Report each call of a patched function to an observer. Several observers can be active at once.

        Starting the first observer and stopping the last one installs the replacements again, which takes tens of
        milliseconds. In between each call costs a few microseconds more. Compiled code is not observed.

        Args:
            observer: An `autoamp.tools.Observer`.

        Returns:
            An object whose ``stop()`` ends the observation; also a context manager. `deactivate` ends it too.

        Raises:
            UsageError: The handle is not active, or ``observer`` is not an observer.
        """
        return self._active_looks.observation.observe(observer)

    def count(self) -> Counts:
        """Count the calls of listed functions and the casts of their arguments. Costs some microseconds per call.

        Returns:
            The counts. Their ``stop()`` ends the counting; also a context manager. `deactivate` ends it too.

        Raises:
            UsageError: The handle is not active.
        """
        run = self._active_looks
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
        return CastTrace(self._active_looks.observation)

    def profile_ranges(self) -> RangeProfile:
        """Profile the ranges of values inside a ``with`` statement. Casts are off in this thread meanwhile.

        Results are bitwise those of fp32. ``print(ranges)`` shows a table and a verdict on fp16 and bf16. The profile
        also has ``to_dict`` and ``to_json``.

        Raises:
            UsageError: The handle is not active.
        """
        return RangeProfile(self._active_looks.observation, lambda: self.loss_scale)

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
        run = self._active_looks
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
        found = report_of(self._looks.recording, self._runtime.nonfinite, self.settings.rules_in_force)
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
        check = ConsistencyCheck(
            model, inputs, named_inputs, self._runtime.precisions, self._active_looks.overflows, self.inference
        )
        return check.run(backend)

    @property
    def last_overflow(self) -> Overflow | None:
        """What the last explained skip came from, or None. With ``trace_overflow=True`` every skip is explained."""
        return self._looks.overflows.last

    @property
    def stats(self) -> dict[str, Any]:
        """How training goes, as plain JSON values; waits for the device where that alone knows of the last steps.

        ``loss_scale``; ``loss_scales`` and ``found_inf``, the number of overflows, of each loss; ``steps`` and
        ``skipped`` of all optimizers, the program's own `FP16_Optimizer` included; ``last_step_skipped``;
        ``nonfinite``, the steps that no loss scale guards and whose gradients or loss held inf or nan; ``casts``, what
        `count` counted, such as ``{"float32->float16": 5}``, and None before that; ``overflows`` by kind, as far as
        they were explained.
        """
        run, looks, counts = self._runtime, self._looks, self._runtime.optimizers.steps
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
            "casts": None if looks.call_counts is None else looks.call_counts.as_dict()["casts"],
            "overflows": dict(Counter(found.kind for found in looks.overflows.all)),
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
            if self._runtime.optimizers.steps.all % every == 0:
                now = self.stats
                write_scalars(writer, {name: float(now[name]) for name in ("loss_scale", "skipped")}, now["steps"])

        return self._looks.followers.add(write, after_skips=True)

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
        return self._looks.followers.follow(followers)

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
        scale = self._runtime.optimizers.steps.loss_scale(self.loss_scale)
        return self._active_looks.overflows.explain_loss(step_fn, scale)


class Handle(BaseHandle, EnabledHandle):
    """An enabled handle: ``isinstance(handle, autoamp.Handle)`` is true if autoamp casts."""


class NoOpHandle(BaseHandle, DisabledHandle):
    """The handle that ``init(enabled=False)`` returns. It casts nothing, scales nothing and counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._listening = contextlib.ExitStack()

    @property
    def _active_looks(self) -> Diagnostics:
        return self._looks

    def deactivate(self) -> tuple[str, ...]:
        """Call the functions of `follow` no more."""
        self._listening.close()
        return super().deactivate()

    def record(self, *, sample: bool = True) -> ReportRecording:
        """Return a recording that has ended."""
        recording = self._looks.recording = self._looks.new_recording(sample=sample)
        recording.stop()
        return recording

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return ``{}``, and write no file."""
        return {}

    @property
    def stats(self) -> dict[str, Any]:
        """The keys of an enabled handle, without any loss."""
        return {**super().stats, "loss_scales": [], "found_inf": []}

    def log_to(self, writer: Any, every: int = 10) -> Callable[[], None]:
        """Write nothing."""
        return lambda: None

    def follow(self, *followers: Any) -> Callable[[], None]:
        """Step schedulers or averages of weights after each step of an optimizer of torch: none is skipped."""
        calls = Followers(Listeners())
        calls.follow(followers)
        listening = listen(optimizer_returned=lambda *_: calls.step_ended(Step()))
        return self._listening.enter_context(listening).close

    def explain_overflow(self, step_fn: Callable[[], Any]) -> Overflow | None:
        """Return None."""


def diagnostics_of(handle: CoreHandle) -> Diagnostics:
    """Return what looks on at a handle that `Handle` or `NoOpHandle` here made."""
    looks = runtime_of(handle).looks
    assert isinstance(looks, Diagnostics)
    return looks


def compose() -> None:
    """Let all handles that are made from now on look on."""
    handles.enabled, handles.disabled = Handle, NoOpHandle
