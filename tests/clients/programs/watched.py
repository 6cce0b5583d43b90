"""A loss that is watched: what gradient reaches the model's output, and one batch that overflows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OVERFLOWING = 5
HUGE = 1e30


class WatchedLoss(nn.Module):
    """Cross entropy. The loss of one training batch is so large that its gradients overflow in half precision.

    Attributes:
        dtypes: Of the model's outputs while it trains.
        gradients: The largest gradient of the outputs, for each training batch.
        moved: Whether the parameters were stepped after each training batch but the last.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Not as a submodule, which would be saved with the loss.
        self._model = [model]
        self.dtypes: set[str] = set()
        self.gradients: list[float] = []
        self.moved: list[bool] = []
        self._before: list[Tensor] | None = None

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the batch: outputs (N, C), target (N,)."""
        loss = F.cross_entropy(outputs.float(), target)
        if not outputs.requires_grad:
            return loss
        self.dtypes.add(str(outputs.dtype))
        # Hooks of autograd nodes see scaled gradients, unlike those of tensors.
        outputs.grad_fn.register_prehook(lambda grads: self.gradients.append(float(grads[0].float().abs().max())))
        now = [param.detach().clone() for param in self._model[0].parameters()]
        if self._before is not None:
            self.moved.append(not all(map(torch.equal, self._before, now)))
        self._before = now
        return loss * (HUGE if len(self.moved) == OVERFLOWING else 1.0)

    def report(self) -> dict[str, Any]:
        """Return what was seen."""
        return {
            "dtypes": sorted(self.dtypes),
            "largest_gradient": max(gradient for gradient in self.gradients if gradient < HUGE / 1e6),
            "not_moved": [i for i, moved in enumerate(self.moved) if not moved],
        }
