"""The loss scale, the rule for its next value, and which loss is scaled by which scaler.

A loss that is multiplied by a scale gives gradients that are multiplied by it too, so small ones survive the range of
half precision. The rule is that of `torch._amp_update_scale_`, which moves a scale on a device; on the host it moves
numbers.

- `StaticLossScaler`: one scale for the whole run.
- `DynamicLossScaler`: lower after an overflow, higher after a long time without one.
- `make_scaler`: the scaler for a ``loss_scale=`` argument.
- `LossScalers`: those of a handle, and the state of all of them as one checkpoint. A loss is told by the ``loss_id``
  that the program gives, and by its optimizers: each call of `initialize` has scalers of its own for the optimizers
  that it names. An optimizer with a ``scale_loss`` of its own has its own scalers, too.
- `UnreadFlags`: flags of overflows that only the device knows, and what the host does once it has read them.

To read a flag, or a scale that depends on it, is to wait for the device. Where an optimizer takes the flag of an
overflow on its device (`LossScaler.update_later`), the rule is applied to numbers there first, and to those of the host
when the flags are read; a training step does not read the scale. Unread flags collect. Each full batch is copied to
pinned memory while the program goes on, and is read once it has arrived, or when the next batch is full. A caller who
asks for what depends on a flag waits, once for all of them.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import math
import numbers
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from autoamp.errors import CheckpointError, LossScaleError, UsageError, kind_of
from autoamp.tensors import is_capturing
from autoamp.torch_private import dispatch_modes, update_scale_

Scale: TypeAlias = float | Tensor
"""A loss scale: a number, or where only the device knows it an fp32 tensor without dimensions that stays as it is."""

Factor: TypeAlias = float | Tensor
"""What gradients are multiplied by: a number, or an fp64 tensor without dimensions."""

# The devices whose work a program's thread can run ahead of.
_ASYNCHRONOUS = frozenset(("cuda", "xpu"))


class _Sent(NamedTuple):
    """Flags on their way to the host, with the event that follows the copy and what is to be called for each."""

    values: Tensor
    event: Any
    tells: list[Callable[[bool], None]]


class UnreadFlags:
    """Flags in the order of their steps, each with what is to be called once it is known.

    Args:
        device_types: Flags on these are worth leaving unread. Those on a CPU cost nothing to read.
        batch: So many flags are copied together. At most twice as many are unread at a time.

    Attributes:
        lock: Taken while flags come and go, and by the scaler that they are for while it moves.
    """

    def __init__(self, device_types: Collection[str] = _ASYNCHRONOUS, batch: int = 16) -> None:
        self.lock = threading.RLock()
        self._device_types = device_types
        self._batch = batch
        self._here: list[tuple[Tensor, Callable[[bool], None]]] = []
        self._blank: dict[torch.device, list[Tensor]] = {}
        self._sent: _Sent | None = None
        self._telling = False

    def __len__(self) -> int:
        """Return how many flags are not known yet."""
        return len(self._here) + (0 if self._sent is None else len(self._sent.tells))

    def serves(self, device: torch.device) -> bool:
        """Whether flags on a device are left unread. A captured CUDA graph would replay the same flags."""
        if device.type == "cuda" and is_capturing():
            return False
        return device.type in self._device_types

    def blank(self, device: torch.device) -> Tensor:
        """Return a flag that is not set: one fp32 element, 0. Many are made at once, as parts of one tensor."""
        if torch.compiler.is_dynamo_compiling() or dispatch_modes():
            # Code would be compiled anew for each number of parts that are left; and what a mode makes may be its own.
            return torch.zeros(1, dtype=torch.float32, device=device)
        with self.lock:
            if not self._blank.get(device):
                with torch.inference_mode(False):
                    self._blank[device] = list(torch.zeros(16, dtype=torch.float32, device=device).split(1))
            return self._blank[device].pop()

    def add(self, found_inf: Tensor, tell: Callable[[bool], None], *, urgent: bool = False) -> None:
        """Take the flag of a step. Flags that have arrived are told now.

        Args:
            found_inf: One element, not 0 for an overflow. Nobody writes to it any more.
            tell: Called with whether the step overflowed, in the order of the steps. It raises nothing.
            urgent: Whether to copy it to the host without waiting for a full batch.
        """
        with self.lock:
            self._here.append((found_inf, tell))
            if self._telling:
                return
            is_full = len(self._here) >= self._batch
            if self._sent is not None and (is_full or self._sent.event is None or self._sent.event.query()):
                self._read_sent()
            if self._sent is None and (is_full or urgent):
                self._send()

    def catch_up(self) -> None:
        """Wait until all flags are known, and call what waits for them. Does nothing while it is at that."""
        # Asked first: compiled code takes no lock.
        if self._here or self._sent is not None:
            with self.lock:
                if not self._telling:
                    self._read_sent()
                    self._send()
                    self._read_sent()

    def _send(self) -> None:
        if not self._here:
            return
        flags, tells = [flag for flag, _ in self._here], [tell for _, tell in self._here]
        self._here = []
        device = flags[0].device
        values = torch.stack([flag.to(device, non_blocking=True).view(()) for flag in flags])
        if device.type == "cpu":
            self._sent = _Sent(values, None, tells)
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.Event(device=device)
        event.record(torch.accelerator.current_stream(device))
        self._sent = _Sent(host, event, tells)

    def _read_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        if sent.event is not None and not sent.event.query():
            sent.event.synchronize()
        self._telling = True
        try:
            for tell, value in zip(sent.tells, sent.values.tolist(), strict=True):
                tell(bool(value))
        finally:
            self._telling = False


def scaled_loss(loss: Tensor, scale: Scale) -> Tensor:
    """Return ``loss.float() * scale``, of the loss's shape and in fp32. Waits for nothing."""
    if isinstance(scale, Tensor):
        return loss.float() * scale.to(loss.device, non_blocking=True)
    return loss.float() * scale if scale != 1.0 else loss.float()


def is_same_scale(one: Scale, other: Scale) -> bool:
    """Tell for sure, and without waiting, that two scales are the same."""
    return one is other or (isinstance(one, float) and isinstance(other, float) and one == other)


def inverse_scale(scale: Scale) -> Factor:
    """Return ``1 / scale``."""
    return scale.double().reciprocal() if isinstance(scale, Tensor) else 1.0 / scale


def scale_ratio(above: Scale, below: Scale) -> Factor:
    """Return ``above / below``."""
    if isinstance(above, Tensor) or isinstance(below, Tensor):
        device = above.device if isinstance(above, Tensor) else below.device  # type: ignore[union-attr]
        as_doubles = [torch.as_tensor(scale, dtype=torch.float64).to(device) for scale in (above, below)]
        return as_doubles[0] / as_doubles[1]
    return above / below


# Between these two the scale and its reciprocal are both normal fp32 numbers. A subnormal one may be flushed to 0.
_SMALLEST = 2.0**-126
_LARGEST = 2.0**126

# Where a scale may be lower than this, flags are copied to the host at once, which then knows better how low it is.
_NEAR_ONE = 2.0**6

# The scale and the growth tracker, on a device.
_State: TypeAlias = tuple[Tensor, Tensor]

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval", "min_loss_scale", "max_loss_scale")


class LossScaler(ABC):
    """The scale of one loss. `update` is told once a step whether the gradients overflowed.

    Subclass it for a rule of your own: ``checks`` and ``update`` are what it takes.

    Args:
        loss_scale: The first scale, from 2**-126 to 2**126.

    Attributes:
        unread: Flags of updates that the host has not made yet. Reading the scale makes them.
        scale_before: The scale before the last update that the host has made.
        last_found_inf: Whether the last step by gradients of this loss overflowed, as far as the host knows.
    """

    def __init__(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        self._unskipped = 0
        self._overflows = 0
        self.last_found_inf = False
        self.scale_before = loss_scale
        self.unread = UnreadFlags()

    @property
    def overflows(self) -> int:
        """How many updates said that gradients of this loss overflowed. Waits as `loss_scale` does."""
        self.unread.catch_up()
        return self._overflows

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss: finite and above 0. Waits for the device where that alone knows it."""
        self.unread.catch_up()
        return self._loss_scale

    @property
    def unskipped(self) -> int:
        """How many updates without an overflow came since the last overflow, or since the scale last grew."""
        self.unread.catch_up()
        return self._unskipped

    @property
    @abstractmethod
    def checks(self) -> bool:
        """Whether gradients must be unscaled and looked through for inf and nan at all."""

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Move on by one step.

        Args:
            found_inf: Whether a gradient of this step held inf or nan.
        """

    def scale_without_sync(self) -> Scale:
        """Return the factor for the next loss, without waiting for a device."""
        return self.loss_scale

    def serves_device(self, device: torch.device) -> bool:
        """Whether `update_later` may be called with flags on this device."""
        return False

    def update_later(self, found_inf: Tensor, tell: Callable[[bool], None], *, urgent: bool = False) -> None:
        """Move on by one step, by a flag that stays on its device.

        Args:
            found_inf: One fp32 element, not 0 where a gradient held inf or nan. Nobody writes to it any more.
            tell: Called after the host's update, once the flag is known; it raises nothing.
            urgent: Whether the host has to know soon what the flags say.
        """

        def move(found: bool) -> None:
            self._move(found)
            tell(found)

        self.unread.add(found_inf, move, urgent=urgent)

    def _move(self, found_inf: bool) -> None:
        self.scale_before, self.last_found_inf = self._loss_scale, found_inf
        self._overflows += found_inf
        self._unskipped = 0 if found_inf else self._unskipped + 1

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"loss_scale": float, "unskipped": int}``, all that a resumed run needs."""
        return {"loss_scale": self.loss_scale, "unskipped": self.unskipped}

    def check_state_dict(self, state_dict: Any, key: str) -> None:
        """Raise unless `load_state_dict` would take this state.

        Args:
            state_dict: What `state_dict` returned, perhaps in another process.
            key: The name of this entry in the whole checkpoint, for the message.

        Raises:
            CheckpointError: An entry is missing, unknown or of a wrong kind; the message names it.
        """
        _read_state(state_dict, key)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the scale and the count of a checkpoint; the checkpoint's scale wins over the one given here.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            CheckpointError: As `check_state_dict`; nothing was changed then.
        """
        state = _read_state(state_dict, "loss_scaler")
        self.unread.catch_up()
        self._loss_scale, self._unskipped = state

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: the state now, and nothing that is under way."""
        self.unread.catch_up()
        return {name: value for name, value in vars(self).items() if name != "unread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of 0.1.0 may have no count, and settings by other names.
        renamed = {f"_{name}": name for name in _SETTINGS}
        vars(self).update(
            {
                "_overflows": 0,
                "last_found_inf": False,
                "scale_before": state["_loss_scale"],
                **{renamed.get(name, name): value for name, value in state.items()},
            }
        )
        self.unread = UnreadFlags()


class StaticLossScaler(LossScaler):
    """A scale that never changes. A step that overflows is skipped all the same.

    With the scale 1.0 there is nothing to unscale, so nothing is checked either: training runs as if without amp,
    without a pass over the gradients and without waiting for the device. That is what bf16 takes by default, whose
    range is that of fp32.

    Args:
        loss_scale: A number from 2**-126 to 2**126.

    Raises:
        LossScaleError: ``loss_scale`` is no such number.
    """

    def __init__(self, loss_scale: float = 1.0) -> None:
        super().__init__(_scale_argument("loss_scale", loss_scale))

    @property
    def checks(self) -> bool:
        """False for the scale 1.0 alone."""
        return self._loss_scale != 1.0

    def update(self, found_inf: bool) -> None:
        """Count the steps without an overflow. See `LossScaler.update`."""
        with self.unread.lock:
            self.unread.catch_up()
            self._move(found_inf)

    def scale_without_sync(self) -> float:
        """Return the scale. See `LossScaler.scale_without_sync`."""
        return self._loss_scale

    def serves_device(self, device: torch.device) -> bool:
        """Whether flags on this device are worth it. See `LossScaler.serves_device`."""
        return type(self).update is StaticLossScaler.update and self.unread.serves(device)

    def __repr__(self) -> str:
        return f"StaticLossScaler(loss_scale={self.loss_scale!r})"


class DynamicLossScaler(LossScaler):
    """The rule of `torch.amp.GradScaler`, in its arithmetic (fp32), within limits.

    After an overflow the scale is multiplied by ``backoff_factor``; after ``growth_interval`` updates in a row without
    one, by ``growth_factor``. It stays in ``[min_loss_scale, max_loss_scale]``, the first value included.

    Args:
        init_scale: The first scale.
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        growth_interval: A whole number of updates, at least 1.
        min_loss_scale: The lower limit; None is 2**-126, the smallest normal fp32 number.
        max_loss_scale: The upper limit; None is 2**126.

    Raises:
        LossScaleError: An argument is outside these rules.
    """

    checks = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        init_scale = _scale_argument("init_scale", init_scale)
        self.growth_factor = _number("growth_factor", growth_factor, "a number above 1, such as 2.0")
        self.backoff_factor = _number("backoff_factor", backoff_factor, "a number between 0 and 1, such as 0.5")
        self.min_loss_scale = _SMALLEST if min_loss_scale is None else _scale_argument("min_loss_scale", min_loss_scale)
        self.max_loss_scale = _LARGEST if max_loss_scale is None else _scale_argument("max_loss_scale", max_loss_scale)
        if not 1.0 < self.growth_factor < math.inf:
            raise LossScaleError(f"growth_factor={growth_factor!r} must be above 1 and finite; 2.0 is usual")
        if not 0.0 < self.backoff_factor < 1.0:
            raise LossScaleError(f"backoff_factor={backoff_factor!r} must be between 0 and 1; 0.5 is usual")
        if not is_count(growth_interval, 1):
            raise LossScaleError(f"growth_interval={growth_interval!r} must be a whole number of steps, at least 1")
        if self.min_loss_scale > self.max_loss_scale:
            raise LossScaleError(
                f"min_loss_scale={min_loss_scale!r} is above max_loss_scale={max_loss_scale!r}; lower the first"
            )
        self.growth_interval = int(growth_interval)
        # The scale and the growth tracker, fp32 and int32 tensors without dimensions; None where they must be made of
        # the numbers first.
        self._on_device: _State | None = None
        super().__init__(self._within_limits(init_scale))

    def update(self, found_inf: bool) -> None:
        """Lower the scale, or count towards the next growth. See `LossScaler.update`."""
        with self.unread.lock:
            self._leave_device()
            self._move(found_inf)

    def scale_without_sync(self) -> Scale:
        """Return the scale, from the device where only that knows it. See `LossScaler.scale_without_sync`."""
        return self._on_device[0] if self._on_device is not None and len(self.unread) else self.loss_scale

    def serves_device(self, device: torch.device) -> bool:
        """Whether flags on this device are left there. See `LossScaler.serves_device`.

        Not where the scale may be below 1 by then, which takes gradients two passes.
        """
        return self._lowest() >= 1.0 and type(self).update is DynamicLossScaler.update and self.unread.serves(device)

    def _lowest(self) -> float:
        """Return what the scale is at least after one more update, if all that are not known yet were overflows."""
        return self._loss_scale * self.backoff_factor ** (len(self.unread) + 1)

    @torch.no_grad()
    def update_later(self, found_inf: Tensor, tell: Callable[[bool], None], *, urgent: bool = False) -> None:
        """Move the scale on the device now, and that of the host later. See `LossScaler.update_later`."""
        device = found_inf.device
        if self._on_device is None or self._on_device[0].device != device:
            self.unread.catch_up()
            self._on_device = self._state_on(device)
        # A new tensor: open blocks and gradients go on with the old scale.
        scale, growth_tracker = self._on_device[0].clone(), self._on_device[1]
        update_scale_(scale, growth_tracker, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval)
        # Whether this update, or one that the host has yet to make, may bring the scale to a limit. By logarithms, as a
        # power may overflow. The tolerance is for their rounding: it costs a clamp at most.
        updates = len(self.unread) + 1
        growths = (self._unskipped + updates) // self.growth_interval
        highest = math.log2(self._loss_scale) + growths * math.log2(self.growth_factor)
        lowest = math.log2(self._loss_scale) + updates * math.log2(self.backoff_factor)
        if highest + 1e-6 >= math.log2(self.max_loss_scale) or lowest - 1e-6 <= math.log2(self.min_loss_scale):
            scale.clamp_(self.min_loss_scale, self.max_loss_scale)
        self._on_device = scale, growth_tracker
        # `_lowest` counts the flags that are unread: asked before this one is added, which may have others read.
        super().update_later(found_inf, tell, urgent=urgent or self._lowest() < _NEAR_ONE)

    @torch.inference_mode(False)
    def _state_on(self, device: torch.device) -> _State:
        # A checkpoint of a longer interval may have brought more: the rule grows at the very end of this one.
        unskipped = min(self._unskipped, self.growth_interval - 1)
        return (
            torch.full((), self._loss_scale, dtype=torch.float32, device=device),
            torch.full((), unskipped, dtype=torch.int32, device=device),
        )

    def _leave_device(self) -> None:
        """Go on from what the host knows, once it has caught up."""
        self.unread.catch_up()
        self._on_device = None

    def __setattr__(self, name: str, value: Any) -> None:
        # Updates from before a setting is changed go by the old one.
        if name in _SETTINGS and "unread" in vars(self):
            self._leave_device()
        super().__setattr__(name, value)

    def _move(self, found_inf: bool) -> None:
        super()._move(found_inf)
        scale = self._loss_scale
        if found_inf:
            scale *= self.backoff_factor
        elif self._unskipped >= self.growth_interval:
            self._unskipped = 0
            grown = ctypes.c_float(scale * self.growth_factor).value
            scale = grown if math.isfinite(grown) else scale
        self._loss_scale = self._within_limits(scale)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the scale, moved into this scaler's limits, and the count. See `LossScaler.load_state_dict`."""
        self._leave_device()
        super().load_state_dict(state_dict)
        self._loss_scale = self._within_limits(self._loss_scale)

    def _within_limits(self, scale: float) -> float:
        limited = min(max(scale, self.min_loss_scale), self.max_loss_scale)
        # As the rule has it, in fp32.
        return ctypes.c_float(limited).value

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_on_device": None}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("loss_scale", *_SETTINGS))
        return f"DynamicLossScaler({shown})"


def make_scaler(
    loss_scale: float | str | LossScaler | None,
    dtype: torch.dtype,
    *,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
) -> LossScaler:
    """Return the scaler that a ``loss_scale=`` argument asks for.

    Args:
        loss_scale: None (dynamic for fp16, 1.0 for any other dtype), ``"dynamic"``, a number, or a scaler, which is
            returned as it is.
        dtype: The half dtype in use.
        min_loss_scale: The lower limit of a dynamic scaler made here.
        max_loss_scale: The upper limit of a dynamic scaler made here.

    Raises:
        LossScaleError: ``loss_scale`` is none of these.
    """
    if isinstance(loss_scale, LossScaler):
        return loss_scale
    if loss_scale is None:
        loss_scale = "dynamic" if dtype == torch.float16 else 1.0
    if loss_scale == "dynamic":
        return DynamicLossScaler(min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
    if isinstance(loss_scale, str):
        raise LossScaleError(f"loss_scale={loss_scale!r} is a string; choose 'dynamic' or a number, such as 128.0")
    return StaticLossScaler(loss_scale)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_count(value: Any, at_least: int = 0) -> bool:
    """Whether a value is a whole number, and not below ``at_least``; a bool is none."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= at_least


def _number(name: str, value: Any, rule: str) -> float:
    if not _is_number(value):
        raise LossScaleError(f"{name}={value!r} is not a number; give {rule}")
    return float(value)


def _scale_argument(name: str, value: Any) -> float:
    scale = _number(name, value, "a number above 0, such as 128.0")
    # Written so that nan fails too.
    if not _SMALLEST <= scale <= _LARGEST:
        raise LossScaleError(f"{name}={value!r} must be from 2**-126 to 2**126; 128.0 is usual")
    return scale


def _read_state(state_dict: Any, key: str) -> tuple[float, int]:
    if not isinstance(state_dict, Mapping) or set(state_dict) != {"loss_scale", "unskipped"}:
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else kind_of(state_dict)
        raise CheckpointError(
            f"{key!r} is not a dict of 'loss_scale' and 'unskipped' alone, but {found}; nothing was loaded"
        )
    scale, unskipped = state_dict["loss_scale"], state_dict["unskipped"]
    # Compared as it is: a whole number may be too large for a float.
    if not _is_number(scale) or not _SMALLEST <= scale <= _LARGEST:
        raise CheckpointError(
            f"{key!r}: 'loss_scale' is {scale!r}, not a finite number from 2**-126 to 2**126; nothing was loaded"
        )
    if not is_count(unskipped):
        raise CheckpointError(
            f"{key!r}: 'unskipped' is {unskipped!r}, not a whole number of 0 or more; nothing was loaded"
        )
    return float(scale), int(unskipped)


class LossScalers:
    """The scalers of all losses.

    Args:
        scalers: One for each ``loss_id``.

    Attributes:
        all: As given, and those that came later, in the order of their entries in a checkpoint.
        own: The scalers of optimizers that have some of their own.
    """

    def __init__(self, scalers: Sequence[LossScaler]) -> None:
        self.all = list(scalers)
        # Of the call of `initialize` that named an optimizer, and of the last call, for optimizers that none named.
        self._by_optimizer: weakref.WeakKeyDictionary[Any, list[LossScaler]] = weakref.WeakKeyDictionary()
        self._current: list[LossScaler] | None = None
        # By which losses were scaled since the last call.
        self._since_initialize: set[LossScaler] = set()
        self.own: weakref.WeakKeyDictionary[Any, list[LossScaler]] = weakref.WeakKeyDictionary()

    @property
    def latest(self) -> list[LossScaler]:
        """Those of the last call of `initialize`, with what earlier ones share with it; without any call all."""
        return self.all if self._current is None else self._current

    def choose(self, loss_id: int, optimizers: Any = ()) -> LossScaler:
        """Return the scaler of a loss of these optimizers: one, or a list or tuple.

        Of optimizers that different calls of `initialize` set up, the first whose gradients are checked decides.

        Raises:
            UsageError: There is none of that number.
        """
        if self._current is None and 0 <= loss_id < len(self.all):
            return self.all[loss_id]
        choices = [self.latest]
        # What no weak reference can be made to is refused where it is guarded.
        with contextlib.suppress(TypeError):
            choices = [self._by_optimizer.get(one, choices[0]) for one in as_list(optimizers)] or choices
        fitting = [scalers[loss_id] for scalers in choices if 0 <= loss_id < len(scalers)]
        if not fitting:
            known = " or ".join(map(str, range(max(map(len, choices)))))
            raise UsageError(f"loss_id={loss_id} has no scaler; choose {known}")
        chosen = next((scaler for scaler in fitting if scaler.checks), fitting[0])
        self._since_initialize.add(chosen)
        return chosen

    def use(self, scalers: list[LossScaler], optimizers: Iterable[Any]) -> None:
        """Scale losses of these optimizers, and of all that no call of `initialize` named, by these scalers.

        Args:
            scalers: One for each ``loss_id``.
            optimizers: Those that a call of `initialize` names.
        """
        self.all += [scaler for scaler in scalers if not any(scaler is known for known in self.all)]
        self._current = scalers
        self._since_initialize.clear()
        for optimizer in optimizers:
            self._by_optimizer[optimizer] = scalers

    def forget_but(self, scalers: Iterable[LossScaler]) -> None:
        """Forget all scalers but these, and the optimizers' own."""
        # Nobody asks a scaler that is forgotten about the steps that it has yet to hear of.
        self.catch_up()
        wanted = {id(scaler) for scaler in (*scalers, *(s for own in self.own.values() for s in own))}
        self.all = [scaler for scaler in self.all if id(scaler) in wanted]

    def catch_up(self) -> None:
        """Let all scalers hear of what became of the last steps. Waits for the device where that alone knows."""
        for scaler in self.all:
            scaler.unread.catch_up()

    # -- optimizers with scalers of their own --

    def give_own(self, optimizer: Any, scalers: Sequence[LossScaler]) -> list[LossScaler]:
        """Give an optimizer scalers of its own, in place of those that it had, and return them.

        Args:
            optimizer: Referred to weakly.
            scalers: One for each loss of a step. A scaler that serves another loss already is copied. When the first
                optimizer gets its own, all scalers that were there are forgotten.
        """
        before = self.own.get(optimizer, ())
        taken = [scaler for scaler in self.all if scaler not in before] if self.own else []
        own: list[LossScaler] = []
        for scaler in scalers:
            # No loss may move the scale of another.
            own.append(copy.copy(scaler) if scaler in (*taken, *own) else scaler)
        self.all = [*taken, *own]
        self.own[optimizer] = own
        return own

    def forget_own(self, optimizer: Any) -> None:
        """Take an optimizer's own scalers and its ``scale_loss`` back, if it had any."""
        if self.own.pop(optimizer, None) is not None:
            vars(optimizer).pop("scale_loss", None)

    # -- checkpoints --

    @property
    def has_dynamic(self) -> bool:
        """Whether a scaler has a scale that moves, so that a resumed run has to know it."""
        return any(isinstance(scaler, DynamicLossScaler) for scaler in self.all)

    def state_dict(self, skipped_steps: int) -> dict[str, Any]:
        """Return the scalers' state, ``loss_scaler0`` and so on, with the number of skips as ``skipped_steps``.

        Of the scalers of earlier calls of `initialize` those that losses were scaled by since the last one: models of
        an earlier training may live on.
        """
        scalers = self.all
        if self._current is not None:
            wanted = {*self._current, *self._since_initialize}
            scalers = [scaler for scaler in scalers if scaler in wanted]
        state: dict[str, Any] = {f"loss_scaler{i}": scaler.state_dict() for i, scaler in enumerate(scalers)}
        return {**state, "skipped_steps": skipped_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Load what `state_dict` returned, all of it or nothing.

        Returns:
            The number of skips; 0 for a checkpoint of Apex, which has none.

        Raises:
            CheckpointError: A key is missing, unknown or of the wrong kind. The message names it.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(f"the state is {kind_of(state)}; pass what state_dict() returned; nothing was loaded")
        if "_growth_tracker" in state:
            raise CheckpointError(
                "expected the result of state_dict(), got the state of a torch.amp.GradScaler; nothing was loaded. "
                "docs/howto/grad_scaler.md shows how to load it: pass {'loss_scaler0': {'loss_scale': state['scale'], "
                "'unskipped': state['_growth_tracker']}}"
            )
        # Earlier models may just live on: their scalers are in no checkpoint of the last call.
        count = sum(str(key).startswith("loss_scaler") for key in state)
        scalers = self.latest if count == len(self.latest) else self.all
        names = [f"loss_scaler{i}" for i in range(len(scalers))]
        missing = [name for name in names if name not in state]
        if count == 0:
            raise CheckpointError(
                f"expected the result of state_dict(), with the keys {', '.join(names)}, skipped_steps; got "
                f"{len(state)} keys, the first {list(state)[:3]}; nothing was loaded"
            )
        for key in missing or sorted(str(key) for key in state if key not in {*names, "skipped_steps"}):
            raise CheckpointError(
                f"key {key!r} is {'missing' if missing else 'unknown'}; this run has the loss scalers "
                f"{', '.join(names)}; nothing was loaded"
            )
        skipped = state.get("skipped_steps", 0)
        if not is_count(skipped):
            raise CheckpointError(
                f"key 'skipped_steps': {skipped!r} is not a whole number of 0 or more; nothing was loaded"
            )
        for name, scaler in zip(names, scalers, strict=True):
            scaler.check_state_dict(state[name], name)
        for name, scaler in zip(names, scalers, strict=True):
            scaler.load_state_dict(state[name])
        return int(skipped)


def as_list(values: Any) -> list[Any]:
    """Return optimizers or models as a list: one of them, or a list or tuple."""
    return list(values) if isinstance(values, (list, tuple)) else [values]
