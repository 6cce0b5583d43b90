"""What `autoamp run` sets up before a program, and counts for the report: casts, loss scaling, the tree `apex`."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoamp import runtime
from autoamp.cli.options import DTYPES, Options, loss_scale_of
from autoamp.cli.report import Report
from autoamp.cli.sources import setup_call
from autoamp.compat import install_as_apex, real_apex
from autoamp.diagnostics import Counts, sum_of
from autoamp.errors import UsageError
from autoamp.levels import LEVELS
from autoamp.modules import ModuleCasts
from autoamp.runtime import Handle, runtime_of
from autoamp.tensors import default_device_type, half_dtype_with_units

__all__ = ["Run", "set_up"]


def set_up(options: Options, *, count: bool = False, record: bool = False) -> Run:
    """Prepare this process, or a child of it, for the program: before the program's first import.

    Args:
        options: What the command line says.
        count: Whether calls and casts are counted, which costs some microseconds a call.
        record: Whether the run is recorded for a report.

    Raises:
        UsageError: An option is wrong.
        ListFileError: A list cannot be used.
    """
    loss_scale = loss_scale_of(options.loss_scale)
    if options.opt_level not in LEVELS:
        raise UsageError(f"--opt-level {options.opt_level!r} is unknown; choose {', '.join(LEVELS)}")
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    lists = list(options.lists)
    real = real_apex() if options.apex and not options.shadow_apex else None
    alias = options.apex and real is None
    if options.opt_level in ("O2", "O3") and not alias:
        why = f"a real apex ({real}) takes the imports; --shadow-apex hides it" if real else "--no-apex is given"
        raise UsageError(
            f"--opt-level {options.opt_level} acts where the program calls apex's amp.initialize(), and {why}; "
            "use --opt-level O1, which needs no call"
        )
    handle, (device_type, default) = None, _defaults(options.device_type)
    if options.opt_level == "O1":
        made = runtime.init(
            dtype=dtype or default, device_type=device_type, lists=lists or None, loss_scale=loss_scale,
            scope="modules", trace_overflow=options.trace_overflow,
        )  # fmt: skip
        handle = made if isinstance(made, Handle) else None
    try:
        if alias:
            install_as_apex(
                dtype=dtype, device_type=device_type, lists=lists,
                opt_level=options.opt_level, loss_scale=loss_scale, shadow=options.shadow_apex,
                trace_overflow=options.trace_overflow,
            )  # fmt: skip
        if options.fastai1:
            importlib.import_module("autoamp.compat.fastai1").enable()
    except BaseException:
        if handle is not None:
            handle.deactivate()
        raise
    return Run(options, handle, real, count=count, record=record)


def _defaults(device_type: str | None) -> tuple[str | None, torch.dtype | None]:
    """Return the device type that is cast, and the half dtype of a program that names none."""
    if device_type not in (None, "cuda"):
        # What this may be is for `init` to tell.
        return device_type, None
    device_type, name = _asked_apart(lambda: _names_of_defaults(device_type))
    return device_type, getattr(torch, name)


def _names_of_defaults(device_type: str | None) -> tuple[str, str]:
    kind = default_device_type() if device_type is None else device_type
    return kind, str(half_dtype_with_units(kind)).removeprefix("torch.")


def _asked_apart(question: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Answer a question on the device in a child of this process, which is to be as a program finds it under Python.

    Whoever asks CUDA what there is fixes which GPUs are visible, and cannot use them in processes that it forks.
    """
    if not torch.backends.cuda.is_built() or not hasattr(os, "fork") or torch.cuda.is_initialized():
        return question()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(question()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        # It failed there; here its error is seen.
        return question()
    kind, name = json.loads(answer)
    return kind, name


class Run:
    """A program's run: the handle that it began with, and the time.

    Attributes:
        handle: What `set_up` made; None where the opt level patches nothing.
        real_apex: Where the real `apex` lies that the program will import, None where it is autoamp's or none.
    """

    def __init__(
        self, options: Options, handle: Handle | None, real: str | None, *, count: bool, record: bool = False
    ) -> None:
        self.options = options
        self.handle = handle
        self.real_apex = real
        self._began = time.perf_counter()
        self._counts: list[Counts] = []
        self._forget: Callable[[], None] = lambda: None
        self._scaling = None if handle is None else handle.auto_scale()
        casts = None if handle is None else runtime_of(handle).casts
        if isinstance(casts, ModuleCasts):
            casts.wait_for(setup_call)
        if count:
            if handle is not None:
                self._count(handle)
            # The program may set amp up itself, with a handle of its own.
            self._forget = runtime.activated.listen(self._count)
        self._forget_recording: Callable[[], None] = lambda: None
        if record:
            if handle is not None:
                handle.record()
            self._forget_recording = runtime.activated.listen(lambda made: made.record())

    def end_recording(self) -> dict[str, Any] | None:
        """Record no more, and return the values of what was recorded; None where there is no handle."""
        now = runtime.current_handle() or self.handle
        self._forget_recording()
        if now is None:
            return None
        recording = runtime_of(now).recording
        if recording is not None:
            recording.stop()
        return now.report()

    def _count(self, handle: Handle) -> None:
        counts = handle.count()
        # A handle that was suspended, in favour of a region's, goes on with its own.
        if counts not in self._counts:
            self._counts.append(counts)

    def report(self, program: list[str], exit_code: int) -> Report:
        """Return how it went up to now."""
        now = runtime.current_handle() or self.handle
        self._forget()
        self._forget = lambda: None
        counts = sum_of(self._counts) if self._counts else None
        casts = None if now is None else runtime_of(now).casts
        scoped = casts if isinstance(casts, ModuleCasts) else None
        return Report(
            program=program,
            opt_level=(None if now is None else now.settings.opt_level) or self.options.opt_level,
            device_type=None if now is None else now.settings.device_type,
            dtype=None if now is None else str(now.settings.dtype).removeprefix("torch."),
            ops=None if counts is None else counts.by_dtype(),
            casts=None if counts is None else _by_target(counts.casts),
            functions=None if counts is None else counts.ops,
            **self._steps(now),
            seconds=time.perf_counter() - self._began,
            exit_code=exit_code,
            by_program=now is not self.handle,
            casts_left_to=None if scoped is None else scoped.left_to,
            waited_for=None if scoped is None else scoped.waits_for,
        )

    def _steps(self, now: Handle | None) -> dict[str, Any]:
        """Return what a report says of steps and the loss scale."""
        if now is None:
            return {"loss_scale": None, "steps": 0, "skipped": 0}
        done, left_to = runtime_of(now).optimizers, None if self._scaling is None else self._scaling.standing_aside
        own = done.own
        if own is not None:
            return {
                "loss_scale": own.loss_scale,
                "steps": own.steps,
                "skipped": own.skipped,
                "scaling_left_to": "FP16_Optimizer",
            }
        ours = left_to is None and (done.guarded > 0 or now is not self.handle)
        return {
            "loss_scale": now.loss_scale if ours else None,
            "steps": done.steps,
            "skipped": now.skipped_steps,
            "scaling_left_to": left_to,
        }


def _by_target(casts: Mapping[tuple[str, str], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, after), count in sorted(casts.items()):
        found[after] = found.get(after, 0) + count
    return found
