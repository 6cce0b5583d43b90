"""What `autoamp run` sets up before a program and tells after it: casts, loss scaling, the alias, the report."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from autoamp import runtime
from autoamp.compat.alias import install_as_apex, real_apex
from autoamp.counting import Counts, sum_of
from autoamp.errors import UsageError
from autoamp.handle import Handle
from autoamp.scaling import make_scaler

__all__ = ["DTYPES", "LEVELS", "Options", "Report", "Run", "loss_scale_of", "set_up"]

DTYPES = {"fp16": torch.float16, "float16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
LEVELS = ("O0", "O1", "O2", "O3")


@dataclass(frozen=True)
class Options:
    """What the command line of `autoamp run` says; plain values, since children are told them as JSON.

    Attributes:
        dtype: A key of `DTYPES`. None is torch's own choice for the device type, and fp16 for a program of Apex.
        device_type: As for `autoamp.init`.
        lists: List sets and files, on top of the project's own.
        opt_level: ``"O1"`` patches torch and scales losses. The others act where the program calls ``initialize``.
        loss_scale: ``"dynamic"``, or a number in digits. None is `autoamp.init`'s choice.
        apex: Whether ``import apex`` finds autoamp.
        shadow_apex: Whether a real `apex` is hidden.
        fastai1: Whether fastai v1 is made to run on today's torch.
    """

    dtype: str | None = None
    device_type: str | None = None
    lists: tuple[str, ...] = ()
    opt_level: str = "O1"
    loss_scale: str | None = None
    apex: bool = True
    shadow_apex: bool = False
    fastai1: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Take the options out of a mapping that may have more, such as a parsed command line or JSON."""
        chosen = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{**chosen, "lists": tuple(chosen.get("lists", ()))})

    def as_dict(self) -> dict[str, Any]:
        """Return the options as JSON has them."""
        return {**asdict(self), "lists": list(self.lists)}


def loss_scale_of(text: str | None) -> str | float | None:
    """Return what `autoamp.init` takes as ``loss_scale``.

    Raises:
        UsageError: This is neither ``"dynamic"`` nor a number.
    """
    if text is None or text == "dynamic":
        return text
    try:
        scale = float(text)
        make_scaler(scale, torch.float16)
        return scale
    except ValueError:
        raise UsageError(f"--loss-scale {text!r} is no loss scale; give 'dynamic' or a number above 0") from None


@dataclass(frozen=True)
class Report:
    """How a run went. Counts are of one process; ``dtype`` is None where nothing was cast.

    Attributes:
        ops: How often functions of the lists were called, by the dtype that they ran in. Like ``casts`` and
            ``functions`` None where nobody counted, as after a program's own ``initialize``.
        casts: How many arguments were cast, by the dtype that they were cast to.
        functions: The calls of each function, by the dtype that it ran in.
        steps: Optimizer steps, the skipped ones included.
        by_program: Whether the program set mixed precision up itself.
        scaling_left_to: What the program uses of torch, so that scaling its losses was left to it; else None.
    """

    program: list[str]
    opt_level: str
    device_type: str | None
    dtype: str | None
    ops: dict[str, int] | None
    casts: dict[str, int] | None
    functions: dict[str, dict[str, int]] | None
    loss_scale: float
    steps: int
    skipped: int
    seconds: float
    exit_code: int
    by_program: bool
    scaling_left_to: str | None = None
    versions: dict[str, str] = field(default_factory=lambda: versions())

    def summary(self) -> str:
        """Return one line for people."""
        if self.dtype is None:
            why = f"({self.opt_level})"
            if self.opt_level in ("O2", "O3") and self.exit_code == 0:
                why += ": that level casts what a program gives to amp.initialize(), which was not called; use O1"
            return f"autoamp: no casts {why}; {self.seconds:.1f} s"
        level = f"{self.opt_level}, set up by the program" if self.by_program else self.opt_level
        parts = [
            f"{self.dtype} on {self.device_type} ({level})",
            *([] if self.ops is None else [f"ops {_listed(self.ops)}"]),
            *([] if self.casts is None else [f"casts {_listed(self.casts, 'to ')}"]),
            *(
                [f"loss scale {self.loss_scale:g}", f"{self.skipped} of {self.steps} steps skipped"]
                if self.scaling_left_to is None
                else [f"loss scaling left to the program's {self.scaling_left_to}"]
            ),
            f"{self.seconds:.1f} s",
        ]
        return "autoamp: " + "; ".join(parts)

    def as_json(self) -> str:
        """Return the report as a JSON object, with a line end."""
        return json.dumps(asdict(self), indent=2) + "\n"


def versions() -> dict[str, str]:
    """Return the versions of what takes part: autoamp, torch and Python."""
    ours = str(getattr(sys.modules["autoamp"], "__version__", ""))
    return {"autoamp": ours, "torch": torch.__version__, "python": platform.python_version()}


def set_up(options: Options, *, count: bool = False) -> Run:
    """Prepare this process, or a child of it, for the program: before the program's first import.

    Args:
        options: What the command line says.
        count: Whether calls and casts are counted, which costs some microseconds a call.

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
    handle = None
    if options.opt_level == "O1":
        made = runtime.init(dtype=dtype, device_type=options.device_type, lists=lists or None, loss_scale=loss_scale)
        handle = made if isinstance(made, Handle) else None
    try:
        if alias:
            install_as_apex(
                dtype=dtype, device_type=options.device_type, lists=lists,
                opt_level=options.opt_level, loss_scale=loss_scale, shadow=options.shadow_apex,
            )  # fmt: skip
        if options.fastai1:
            importlib.import_module("autoamp.compat.fastai1").enable()
    except BaseException:
        if handle is not None:
            handle.deactivate()
        raise
    return Run(options, handle, real, count=count)


class Run:
    """A program's run: the handle that it began with, and the time.

    Attributes:
        handle: What `set_up` made; None where the opt level patches nothing.
        real_apex: Where the real `apex` lies that the program will import, None where it is autoamp's or none.
    """

    def __init__(self, options: Options, handle: Handle | None, real: str | None, *, count: bool) -> None:
        self.options = options
        self.handle = handle
        self.real_apex = real
        self._began = time.perf_counter()
        self._counts: list[Counts] = []
        self._forget: Callable[[], None] = lambda: None
        self._scaling = None if handle is None else handle.auto_scale()
        if count:
            if handle is not None:
                self._count(handle)
            # The program may set amp up itself, with a handle of its own.
            self._forget = runtime.when_put(self._count)

    def _count(self, handle: Handle) -> None:
        self._counts.append(handle.count())

    def report(self, program: list[str], exit_code: int) -> Report:
        """Return how it went up to now."""
        now = runtime.current_handle() or self.handle
        self._forget()
        self._forget = lambda: None
        counts = sum_of(self._counts) if self._counts else None
        return Report(
            program=program,
            opt_level=(None if now is None else now.settings.opt_level) or self.options.opt_level,
            device_type=None if now is None else now.settings.device_type,
            dtype=None if now is None else str(now.settings.dtype).removeprefix("torch."),
            ops=None if counts is None else counts.by_dtype(),
            casts=None if counts is None else _by_target(counts.casts),
            functions=None if counts is None else counts.ops,
            loss_scale=1.0 if now is None else now.loss_scale,
            steps=0 if now is None else now.optimizers.steps,
            skipped=0 if now is None else now.skipped_steps,
            seconds=time.perf_counter() - self._began,
            exit_code=exit_code,
            by_program=now is not self.handle,
            scaling_left_to=None if self._scaling is None else self._scaling.standing_aside,
        )


def _by_target(casts: Mapping[tuple[str, str], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, after), count in sorted(casts.items()):
        found[after] = found.get(after, 0) + count
    return found


def _listed(counts: Mapping[str, int], before: str = "") -> str:
    return ", ".join(f"{count:,} {before}{name}" for name, count in counts.items()) or "0"
