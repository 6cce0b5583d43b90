"""Sets a process up for a program under `autoamp run`, and counts its calls, casts and steps for the report."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoamp import core, tools
from autoamp.apex import fastai1
from autoamp.apex.alias import added_to_real_apex, explain_real_apex, install_as_apex, real_apex
from autoamp.apex.levels import LevelName, check_level
from autoamp.cli.first_step import FirstStep
from autoamp.cli.memory import keep_freed_memory, peak_rss
from autoamp.cli.report import Report
from autoamp.core import (
    AUTOCAST,
    CastState,
    OnNonfinite,
    Runtime,
    StaticLossScaler,
    package_tables,
    runtime_of,
    versions,
)
from autoamp.errors import UsageError, warn_user
from autoamp.half_units import half_dtype, half_dtype_with_units, log_fp32
from autoamp.tensors import HALF_DTYPES, default_device_type, dtype_name
from autoamp.tools import BaseHandle, Counts, HalfLosses, Handle, diagnostics_of, sum_of


@dataclass(frozen=True)
class Options:
    """The options of `autoamp run`: plain values, since children get them as JSON.

    Attributes:
        dtype: The name of a half dtype. None is bf16 or fp16 where the device has units for it, in this order, else
            fp32; and fp16 for a program of Apex.
        device_type: As for `autoamp.init`.
        lists: List sets and files, on top of the project's own.
        opt_level: ``"O1"`` patches torch and scales losses. The others act where the program calls ``initialize``.
        loss_scale: ``"dynamic"``, or a number in digits. None is `autoamp.init`'s choice.
        apex: Whether ``import apex`` finds autoamp.
        shadow_apex: Whether a real `apex` is hidden.
        fastai1: Whether fastai v1 is made to run on today's torch.
        trace_overflow: Whether skipped steps are explained, in the log.
        capsule: As for `autoamp.init`.
        keep_memory: Whether freed memory is kept where the run computes on a CPU.
        on_nonfinite: As for `autoamp.init`.
        quiet: Whether there is no summary.
    """

    dtype: str | None = None
    device_type: str | None = None
    lists: list[str] = field(default_factory=list)
    opt_level: LevelName = "O1"
    loss_scale: str | None = None
    apex: bool = True
    shadow_apex: bool = False
    fastai1: bool = False
    trace_overflow: bool = False
    capsule: str | None = None
    keep_memory: bool = True
    on_nonfinite: OnNonfinite = "warn"
    quiet: bool = True

    @classmethod
    def from_command_line(cls, chosen: argparse.Namespace) -> Options:
        """Take the options out of a parsed command line, which has more."""
        return cls(**{name: value for name, value in vars(chosen).items() if name in cls.__dataclass_fields__})


def set_up(options: Options, *, record: bool = False, sample: bool = True) -> Run:
    """Set this process, or a child of it, up for the program, before the program's first import.

    Args:
        options: The options of the command line.
        record: Whether the run is recorded for a report. Calls and casts are counted exactly for it, which costs some
            microseconds a call.
        sample: Whether some steps are looked at closely for it.

    Raises:
        UsageError: An option is wrong.
        ListFileError: A list cannot be used.
    """
    loss_scale: Any = options.loss_scale
    if loss_scale not in (None, "dynamic"):
        try:
            loss_scale = StaticLossScaler(float(loss_scale)).loss_scale
        except ValueError:
            raise UsageError(f"loss_scale={loss_scale!r}: expected 'dynamic' or a number above 0") from None
    check_level(options.opt_level)
    dtype = half_dtype(options.dtype)
    if options.device_type is not None:
        core.check_device(core.device_type_of(options.device_type))
    real = real_apex() if options.apex and not options.shadow_apex else None
    alias = options.apex and (real is None or "amp" in added_to_real_apex())
    if options.opt_level in ("O2", "O3") and not alias:
        why = f"a real apex with amp is installed ({real}); --shadow-apex hides it" if real else "--no-apex is given"
        raise UsageError(
            f"opt_level={options.opt_level} only applies if the program calls apex's amp.initialize(), and {why}; "
            "use opt_level=O1, which needs no call"
        )
    if options.capsule is not None and options.opt_level != "O1":
        raise UsageError(f"capsule=: expected opt_level=O1, got {options.opt_level}; capsules are of O1 alone")
    # In a process that has not imported the public names of `autoamp`, which does this too.
    tools.compose()
    handle: BaseHandle = tools.NoOpHandle()
    device_type, default = _defaults(options.device_type)
    if options.opt_level == "O1" and dtype is None and default is torch.float32:
        log_fp32(device_type or "cpu")
        options = replace(options, opt_level="O0")
    if options.opt_level == "O1":
        handle = tools.init(
            dtype=dtype or default, device_type=device_type, lists=options.lists or None, loss_scale=loss_scale,
            scope="modules", trace_overflow=options.trace_overflow, capsule=options.capsule,
            on_nonfinite=options.on_nonfinite,
        )  # fmt: skip
    if alias:
        install_as_apex(
            dtype=dtype, device_type=device_type, lists=options.lists,
            opt_level=options.opt_level, loss_scale=loss_scale, shadow=options.shadow_apex,
            trace_overflow=options.trace_overflow, on_nonfinite=options.on_nonfinite,
        )  # fmt: skip
    elif real is not None:
        explain_real_apex()
    fastai1.watch()
    if options.fastai1:
        fastai1.enable()
    # After the import of torch is early enough: it frees little memory.
    memory = keep_freed_memory() if options.keep_memory and device_type == "cpu" else None
    return Run(options, handle, record=record, sample=sample, memory=memory)


def _defaults(device_type: str | None) -> tuple[str | None, torch.dtype | None]:
    """Return the device type that is cast, and the dtype if none is given: fp32 if the device has no half units."""
    if device_type not in (None, "cuda", "cpu"):
        # `init` checks other types.
        return device_type, None
    if not torch.backends.cuda.is_built() or not hasattr(os, "fork") or torch.cuda.is_initialized():
        return _asked(device_type)
    # A process that has initialized CUDA has fixed the visible GPUs, and cannot use them in its forks.
    with multiprocessing.get_context("fork").Pool(1) as apart:
        found = apart.apply(_asked, (device_type,))
    # `Report.only_waited` tells by this module whether the program has started processes.
    sys.modules.pop("multiprocessing.popen_fork", None)
    return found


def _asked(device_type: str | None) -> tuple[str, torch.dtype]:
    kind = default_device_type() if device_type is None else device_type
    return kind, half_dtype_with_units(kind) or torch.float32


class Run:
    """A program's run: the handle that it began with, and the time.

    Attributes:
        options: The options; of level ``"O0"`` if the device has no half units, and no dtype is given.
        handle: The handle from `set_up`; a disabled one if the opt level patches nothing.
    """

    def __init__(self, options: Options, handle: BaseHandle, *, record: bool, sample: bool, memory: str | None) -> None:
        self.options = options
        self.handle = self._last = handle
        self._memory = memory
        self._folder = os.getcwd()
        self._began = time.perf_counter()
        self._record = record
        # The exact counts, where the run is recorded.
        self._counts: list[Counts] = []
        # What has cast, with numbers of its own.
        self._casts: list[CastState] = []
        # Listeners that end with the report.
        self._listening = contextlib.ExitStack()
        self._parameters: dict[str, int] | None = None
        # Whether those models are trained by fp32 masters. At the end of the program they may be gone.
        self._masters = False
        self._first_step = FirstStep()
        self._listening.callback(self._first_step.stop)
        self._half_losses = HalfLosses()
        self._scaling = handle.auto_scale()
        if record:
            # Not the handle's own: half models are also trained where there is none.
            self._half_losses.start()
            self._listening.callback(self._half_losses.stop)
        if record or not options.quiet:
            self.follow(self._count)
        if options.capsule is not None or options.dtype is not None:
            self.follow(self._check_options)
        if record:
            self.follow(lambda made: made.record(sample=sample))

    def follow(self, act: Callable[[BaseHandle], object]) -> None:
        """Call a function with the handle, and until the report with each later one."""
        if isinstance(self.handle, Handle):
            act(self.handle)
        core.activated.append(act)
        self._listening.callback(core.activated.remove, act)

    @property
    def _now(self) -> BaseHandle:
        return tools.current_handle() or self._last

    def end_recording(self) -> dict[str, Any]:
        """Stop recording and return the recorded values; none if nothing was recorded."""
        recording = diagnostics_of(self._now).recording
        if recording is None:
            return {}
        recording.stop()
        return self._now.report()

    def _count(self, handle: BaseHandle) -> None:
        """Count the calls and casts under a handle, and the parameters of models by their dtype."""
        now, self._last = runtime_of(handle), handle
        diagnostics_of(handle).half_losses = self._half_losses
        # A handle that was suspended, in favour of a region's, goes on with its own.
        if self._record and (counts := handle.count()) not in self._counts:
            self._counts.append(counts)
        if now.casts not in self._casts:
            self._casts.append(now.casts)
        self._first_step.begin(now.optimizers.listeners)
        # The models that the program gave to `initialize`, while they are there.
        models = list(now.setups)
        if models:
            found: Counter[str] = Counter()
            for param in {param for model in models for param in model.parameters()}:
                found[dtype_name(param.dtype)] += param.numel()
            self._parameters = dict(sorted(found.items()))
            self._masters = any(one.level.master_weights for one in now.setups.values())

    def _check_options(self, handle: BaseHandle) -> None:
        """Warn of options that have no effect on a handle that the program made itself."""
        folder, dtype = self.options.capsule, half_dtype(self.options.dtype)
        if dtype not in (None, handle.settings.dtype):
            warn_user(
                f"--dtype {self.options.dtype} has no effect from here on: the program made a handle itself, of "
                f"{dtype_name(handle.settings.dtype)}. Pass dtype={dtype} there, or leave the call to autoamp run"
            )
        if folder is not None and handle.settings.capsule is None:
            warn_user(
                f"--capsule {folder} has no effect from here on: expected init(capsule={folder!r}), got a handle that "
                "the program made without a folder for capsules. Pass capsule= there, or leave the call to autoamp run"
            )

    def report(self, program: list[str], exit_code: int) -> Report:
        """Return the report of this process up to now. Its attributes are the values of ``--report``."""
        now, casts_some = runtime_of(self._now), isinstance(self._now, Handle)
        self._listening.close()
        functions, ops, casts = self._exact_counts() if self._record else self._integers()
        own = {dtype_name(dtype): count for dtype, count in now.casts.own_dtypes.most_common()}
        # A list of a package that was not imported has no effect.
        absent = {str(one.file) for one, _ in package_tables() if one.library not in sys.modules}
        # torchrun sets these.
        variables = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
        rank, ranks = (int(text) if text.isdigit() else None for text in variables)
        return Report(
            program=program,
            opt_level=now.settings.opt_level or self.options.opt_level,
            device_type=now.settings.device_type if casts_some else None,
            # None where nothing was set up.
            dtype=self._dtype(now, own) if casts_some else None,
            # Calls of listed functions and casts, by the dtype that they ran in or cast to. Where nothing is recorded,
            # by the dtype that the policy says, or "promoting".
            ops=ops,
            casts=casts,
            functions=functions,
            **self._steps(now),
            seconds=time.perf_counter() - self._began,
            exit_code=exit_code,
            # Why none was counted of a program that steps; None where some were, or it is not known.
            no_ops=None if ops else self._first_step.why_no_op(now.casts),
            # Whether the program set mixed precision up itself.
            by_program=self._now is not self.handle,
            # Whether it ended the handle of this run, as init(enabled=False) does, and began no other.
            turned_off=self._last is self.handle
            and (casts_some or core.handles.base is not None)
            and tools.current_handle() is None,
            # The entries of the user's lists that had no effect, by name, each with a message.
            unmatched={**now.patched.unmatched_rules(), **now.precisions.unmatched()},
            # What the program computes in half precision with, so that casts ended there; else None.
            casts_left_to=now.casts.yielded_to,
            # The half dtypes that the program itself computed in, of torch.autocast by regions entered.
            own_dtypes=own,
            # How many elements the parameters have that `initialize` was given, by their dtype; else None.
            parameters=self._parameters,
            masters=self._masters or now.optimizers.has_masters,
            # The files of the lists in force, later ones over earlier ones.
            lists=[file for file in now.settings.rules_in_force.sources if file not in absent] if casts_some else [],
            folder=self._folder,
            # What was lost in half precision without an inf, a row for each kind.
            half_losses=[*self._half_losses.rows.values(), *diagnostics_of(self._now).buffer_writes.rows],
            lost_params=len(self._half_losses.lost),
            half_params=len(self._half_losses.seen),
            # A sentence for each overflow that was logged once, and came in more steps.
            repeated=diagnostics_of(self._now).overflows.repeated,
            # The result of `keep_freed_memory`; None if it was not called.
            memory=self._memory,
            peak_rss=peak_rss(),
            rank=rank,
            ranks=ranks,
            versions=versions(),
        )

    def _exact_counts(self) -> tuple[dict[str, dict[str, int]], dict[str, int], dict[str, int]]:
        """Return the calls by function and dtype, by dtype, and the casts by dtype: from the observers' counts."""
        counts, casts = sum_of(self._counts), Counter[str]()
        for (_, after), count in sorted(counts.casts.items()):
            casts[after] += count
        return counts.ops, counts.by_dtype(), dict(casts)

    def _integers(self) -> tuple[dict[str, dict[str, int]], dict[str, int], dict[str, int]]:
        """Return the same from what the casts count themselves: no functions, and ops by what their policy says."""
        ops, casts = Counter[str](), Counter[str]()
        for one in self._casts:
            names = {"half": dtype_name(one.dtype), "fp32": "float32", "promote": "promoting"}
            ops.update({names[policy]: calls for policy, (calls,) in one.counts.calls.items() if calls})
            casts.update({dtype_name(dtype): made for dtype, (made,) in one.counts.made.items() if made})
        return {}, dict(ops), dict(casts)

    def _dtype(self, now: Runtime, own: Mapping[str, int]) -> str:
        """Return the dtype that the program ran in: its own, where it has its own mixed precision."""
        if now.casts.yielded_to is not None and (own or now.casts.yielded_to == AUTOCAST):
            return next(iter(own), "float32")
        if now.settings.opt_level is not None and not now.settings.table.rules:
            # O0: nothing is cast, and no parameter is in half precision.
            halves = [dtype_name(dtype) for dtype in HALF_DTYPES if dtype_name(dtype) in (self._parameters or {})]
            return halves[0] if halves else "float32"
        return dtype_name(now.settings.dtype)

    def _steps(self, now: Runtime) -> dict[str, Any]:
        """Return the report's values on steps and the loss scale.

        They are of the program's `FP16_Optimizer` or `GradScaler` where it has one. ``nonfinite`` is in how many steps
        that no loss scale guards the gradients held inf or nan.
        """
        counts, yielded_to = now.optimizers.steps, self._scaling.yielded_to
        by_program = bool(counts.own) or counts.own_scale is not None
        ours = yielded_to is None and (counts.guarded > 0 or self._now is not self.handle)
        if by_program:
            yielded_to = "FP16_Optimizer" if counts.own else "torch.amp.GradScaler"
        return {
            "loss_scale": counts.loss_scale(self._now.loss_scale) if by_program or ours else None,
            "steps": counts.all,
            "skipped": counts.skipped,
            "nonfinite": now.nonfinite.total,
            "scaling_left_to": yielded_to,
            "unused_scaler": self._scaling.has_unused_scaler and counts.own_scale is None,
        }
