"""Small parts of `apex.contrib`: cross entropy, gradient clipping, and a layer norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from autoamp import scaling
from autoamp.apex.normalization.fused_layer_norm import FusedLayerNorm
from autoamp.errors import UsageError


class SoftmaxCrossEntropyLoss:
    """Cross entropy with label smoothing (Szegedy et al. 2015, arXiv:1512.00567), called by ``apply``."""

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Return the loss of each row, computed in fp32, or in fp64 for fp64 logits.

        Args:
            logits: Shape ``(n, classes)``.
            labels: Shape ``(n,)``, class numbers.
            smoothing: The share of the target that is spread over all classes evenly.
            padding_idx: Rows with this label have a loss and a gradient of 0. It is class 0 by default, as in Apex.
            half_to_float: Whether the loss of half logits stays fp32, and is not rounded to their dtype.

        Returns:
            Shape ``(n,)``.

        Raises:
            UsageError: The shapes do not fit.
        """
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise UsageError(
                f"logits of shape {tuple(logits.shape)} and labels of {tuple(labels.shape)}; they must be (n, classes) "
                "and (n,); use view(-1, classes) and view(-1)"
            )
        double = logits.dtype is torch.float64
        wide = logits if double else logits.float()
        losses = F.cross_entropy(
            wide, labels.long(), ignore_index=padding_idx, reduction="none", label_smoothing=smoothing
        )
        return losses if half_to_float or double else losses.to(logits.dtype)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients down, in place, so that their total norm is at most ``max_norm``.

    As `torch.nn.utils.clip_grad_norm_`, but norms of half gradients are computed in fp32, so that they do not overflow.

    Args:
        parameters: A tensor or tensors; those without a gradient are passed over.
        max_norm: The largest norm.
        norm_type: The p of the p-norm; ``inf`` is the largest absolute value.
        error_if_nonfinite: Whether to raise where the norm is inf or nan; this waits for the device.

    Returns:
        The norm before clipping, fp32 (fp64 if a gradient is), without dimensions.

    Raises:
        UsageError: The norm is not finite and ``error_if_nonfinite`` is set; nothing was scaled. Or ``norm_type`` is
            not above 0.
    """
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [parameter.grad for parameter in every if parameter.grad is not None]
    norm = scaling.total_norm(grads, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise UsageError(
            f"the total norm of the gradients is {float(norm)}, so they cannot be clipped; skip this step, or use "
            "error_if_nonfinite=False"
        )
    torch.nn.utils.clip_grads_with_norm_(every, float(max_norm), norm)
    return norm


class FastLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` over the last dimension. Arguments ``(hidden_size, eps=1e-5, memory_efficient=False)``."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, True, memory_efficient)
        self.epsilon = eps
