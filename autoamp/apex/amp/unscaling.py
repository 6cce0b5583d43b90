"""How a program unscales gradients by a scaler itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autoamp.apex.multi_tensor.tensor_lists import multi_tensor_axpby, multi_tensor_scale


class UnscalesByHand:
    """What has a ``loss_scale()`` and an ``_overflow_buf``: it unscales the gradients that it is given."""

    loss_scale: Callable[[], float]
    _overflow_buf: Any

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
