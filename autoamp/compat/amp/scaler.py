"""`apex.amp.scaler.LossScaler` for programs that call it themselves: a scale, its rule, and what unscales gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import scaling
from autoamp.compat.amp.state import ScalerView


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
    _has_overflow = False

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

    def clear_overflow_state(self) -> None:
        """Forget what earlier calls of ``unscale`` found."""
        super().clear_overflow_state()
        self._has_overflow = False

    @torch.no_grad()
    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: Any = None,
    ) -> None:
        """Write ``model_grads / scale`` into ``master_grads``.

        Whether inf or nan is among them is noted, which waits for the device.

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
        self._write([o for _, o in pairs], torch._foreach_mul([m.float() for m, _ in pairs], 1.0 / scale))

    @torch.no_grad()
    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: Any = None,
    ) -> None:
        """Write ``model_grads * out / grads + stashed_master_grads * out / stashed`` into ``master_grads``.

        Whether inf or nan is among the sums is noted, which waits for the device.

        Args:
            model_grads: New gradients, scaled by this scaler.
            stashed_master_grads: Gradients of earlier backward passes, of the same shapes.
            master_grads: The tensors that the sums are written to, of the same shapes.
            scale_override: The scales ``(grads, stashed, out)``; by default this scaler's, 1 and 1.
        """
        of_grads, of_stashed, out = scale_override or (self.loss_scale(), 1.0, 1.0)
        values = torch._foreach_mul([grad.float() for grad in model_grads], out / of_grads)
        torch._foreach_add_(values, [grad.float() for grad in stashed_master_grads], alpha=out / of_stashed)
        self._write(master_grads, values)

    def _write(self, master_grads: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        if values:
            torch._foreach_copy_(list(master_grads), list(values))
            norms = torch._foreach_norm(list(values), float("inf"))
            self._has_overflow |= not all(bool(torch.isfinite(norm)) for norm in norms)

    def update_scale(self) -> bool:
        """Move the scale by what was found, and tell whether the step is to be skipped: never for a static scale."""
        overflow = self._has_overflow or (self._buffer is not None and bool(self._buffer.any()))
        self._scaler.update(overflow)
        return overflow and self.dynamic
