"""Cross entropy with label smoothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
