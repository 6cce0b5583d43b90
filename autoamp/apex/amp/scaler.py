"""`apex.amp.scaler.LossScaler`, and the loss scalers of `amp._amp_state`, by the names of Apex."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import core
from autoamp.apex.amp_C.tensor_lists import multi_tensor_axpby, multi_tensor_scale
from autoamp.apex.fp16_utils.loss_scaler import CurScale
from autoamp.core import OverflowCheck, current_handle, current_runtime, read_checks


class _ScalerField:
    """An option of a dynamic scaler by Apex's name. A static one shows ``static``, or what was written to it.

    Args:
        name: The name here, of the attribute and of the argument.
        kind: Its type.
        static: The value of a static scaler.
    """

    def __init__(self, name: str, kind: Callable[[Any], float], static: float | None) -> None:
        self._name, self._kind, self._static = name, kind, static

    def __get__(self, view: ScalerView, _: Any = None) -> float | None:
        return getattr(view._scaler, self._name, vars(view).get(self._name, self._static))

    def __set__(self, view: ScalerView, value: Any) -> None:
        if isinstance(view._scaler, core.DynamicLossScaler):
            value = self._kind(value)
            core.DynamicLossScaler(1.0, **{self._name: value})  # refuses what no scaler takes
            setattr(view._scaler, self._name, value)
        else:
            vars(view)[self._name] = value


class ScalerView:
    """One loss scaler, by the names of Apex. Writing ``_loss_scale`` takes effect.

    Args:
        scaler: The scaler of autoamp that this is a view on.
    """

    def __init__(self, scaler: core.LossScaler) -> None:
        self._scaler = scaler
        self._noted = False

    @functools.cached_property
    def _overflow_buf(self) -> Tensor:
        handle = current_handle()
        # A program may put another tensor in its place. It writes to this one after an evaluation too.
        with torch.inference_mode(False):
            return torch.zeros(1, dtype=torch.int, device="cpu" if handle is None else handle.settings.device_type)

    def loss_scale(self) -> float:
        """Return the scale for the next loss."""
        return self._scaler.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return isinstance(self._scaler, core.DynamicLossScaler)

    _loss_scale = CurScale.cur_scale

    @property
    def _unskipped(self) -> int:
        return self._scaler.unskipped

    @_unskipped.setter
    def _unskipped(self, count: int) -> None:
        self._scaler.load_state_dict({"loss_scale": self._scaler.loss_scale, "unskipped": int(count)})

    _scale_seq_len = _ScalerField("growth_interval", int, 2000)
    _max_loss_scale = _ScalerField("max_loss_scale", float, None)
    _min_loss_scale = _ScalerField("min_loss_scale", float, None)

    @property
    def _has_overflow(self) -> bool:
        pending = self._pending()
        if self._noted or pending:
            return self._noted or any(check.overflowed for check in pending)
        self._scaler.unread.catch_up()
        return self._scaler.last_found_inf

    @_has_overflow.setter
    def _has_overflow(self, overflow: bool) -> None:
        self._noted = bool(overflow)

    def clear_overflow_state(self) -> None:
        """Forget an overflow that was put into ``_overflow_buf`` or written to ``_has_overflow``."""
        self._overflow_buf.zero_()
        self._noted = False

    def update_scale(self) -> bool:
        """Move the scale by what this step's gradients were found to be, and tell whether the step is to be skipped.

        For programs that check gradients themselves, between `scale_loss` and ``optimizer.step()``: an overflow that
        they put into ``_overflow_buf`` or wrote to ``_has_overflow`` counts too. Elsewhere the scale moves at the step,
        and need not be asked to.
        """
        pending = [check for check in self._pending() if check.scaler_heard.overflow is None]
        noted = self._noted or ("_overflow_buf" in vars(self) and bool(self._overflow_buf.any()))
        if not pending and not noted:
            return self._has_overflow
        # What was written to ``_has_overflow`` counts once. Apex forgets it at the end of the next block.
        self._noted = False
        overflow = noted or any(check.overflowed for check in pending)
        self._scaler.update(overflow)
        for check in pending:
            # The step does not tell the scaler again.
            check.scaler_heard.overflow = True
        return overflow

    def _pending(self) -> list[OverflowCheck]:
        """Return the checks of gradients of this scaler since the last step. Waits for the device."""
        runtime = current_runtime()
        guards = [] if runtime is None else runtime.optimizers.guards
        pending = [check for guard in guards for check in guard.grads.checks if check.scaler is self._scaler]
        read_checks(pending)
        return pending

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: Any = None,
    ) -> None:
        """Write ``model_grads / scale`` into ``master_grads``.

        Inf and nan among them are noted in ``_overflow_buf``.

        Args:
            model_grads: Gradients of any floating dtypes.
            master_grads: As many tensors of the same shapes. Where one of a pair is None, the pair is passed over.
            unused_scale: No effect, as in Apex.
            models_are_masters: No effect: both may be the same tensors.
            scale_override: A scale, or a tuple of which the first is the scale, in place of this scaler's.
        """
        scale = self.loss_scale()
        if scale_override is not None:
            scale = scale_override[0] if isinstance(scale_override, tuple) else scale_override
        pairs = [(m, o) for m, o in zip(model_grads, master_grads, strict=True) if m is not None and o is not None]
        multi_tensor_scale(0, self._overflow_buf, [[m for m, _ in pairs], [o for _, o in pairs]], 1.0 / scale)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: Any = None,
    ) -> None:
        """Write ``model_grads * out / grads + stashed_master_grads * out / stashed`` into ``master_grads``.

        Inf and nan among the gradients are noted in ``_overflow_buf``.

        Args:
            model_grads: New gradients, scaled by this scaler.
            stashed_master_grads: Gradients of earlier backward passes, of the same shapes.
            master_grads: The tensors that the sums are written to, of the same shapes.
            scale_override: The scales ``(grads, stashed, out)``; by default this scaler's, 1 and 1.
        """
        of_grads, of_stashed, out = scale_override or (self.loss_scale(), 1.0, 1.0)
        lists = [model_grads, stashed_master_grads, master_grads]
        multi_tensor_axpby(0, self._overflow_buf, lists, out / of_grads, out / of_stashed)


class LossScaler(ScalerView):
    """A loss scaler whose caller unscales gradients by ``unscale`` and then moves the scale by ``update_scale``.

    Args:
        loss_scale: A number, or ``"dynamic"``.
        init_scale: The first dynamic scale.
        scale_factor: The dynamic scale is divided by it after an overflow, and multiplied by it after ``scale_window``
            updates without one.
        scale_window: See ``scale_factor``.
        min_loss_scale: The lowest dynamic scale.
        max_loss_scale: The highest dynamic scale.

    Raises:
        LossScaleError: An argument is out of range. It is a ValueError.
    """

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        scaler: core.LossScaler
        if loss_scale == "dynamic":
            rule = (scale_factor, 1.0 / scale_factor, scale_window, min_loss_scale, max_loss_scale)
            scaler = core.DynamicLossScaler(min(init_scale, max_loss_scale), *rule)
        else:
            scaler = core.StaticLossScaler(float(loss_scale))
        super().__init__(scaler)

    @property
    def _has_overflow(self) -> bool:
        return bool(self._overflow_buf.any())

    @_has_overflow.setter
    def _has_overflow(self, overflow: bool) -> None:
        self._overflow_buf.fill_(overflow)

    def update_scale(self) -> bool:
        """Move the scale by what was found, and tell whether the step is to be skipped: never for a static scale."""
        overflow = self._has_overflow
        self._scaler.update(overflow)
        return overflow and self.dynamic
