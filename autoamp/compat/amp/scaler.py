"""`apex.amp.scaler.LossScaler` for programs that call it themselves: a scale, its rule, and what unscales gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autoamp import scaling
from autoamp.compat.amp.state import ScalerView
from autoamp.compat.multi_tensor.tensor_lists import multi_tensor_axpby, multi_tensor_scale


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
        scaler: scaling.LossScaler
        if loss_scale == "dynamic":
            scaler = scaling.DynamicLossScaler(
                min(init_scale, max_loss_scale), scale_factor, 1.0 / scale_factor, scale_window, min_loss_scale,
                max_loss_scale,
            )  # fmt: skip
        else:
            scaler = scaling.StaticLossScaler(float(loss_scale))
        super().__init__(scaler)

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
