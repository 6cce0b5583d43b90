"""Memory in which half gradients are widened part by part, each part small enough for the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoamp.scaling.gradient_layout import GradientLayout
from autoamp.scaling.gradients import widened

__all__ = ["Workspace", "limit_of"]

# So many elements are widened at a time: on a CPU, for each thread, what fits into its cache in fp32. Elsewhere each
# part costs launches, and what keeps a device busy is enough; but half of all, if that is less, for the half gradients
# are there beside, and the two are to take no more than all gradients in fp32. Of few elements all.
_ON_CPU, _ELSEWHERE, _FEW = 2**20, 2**24, 2**17


class Workspace:
    """Memory in which half tensors of a CPU are widened again and again, so that no step asks the system for pages."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        # What was returned for each part of a step.
        self._parts: dict[int, GradientLayout[list[Tensor]]] = {}

    def widened(self, tensors: Sequence[Tensor], part: int) -> list[Tensor]:
        """Return half tensors in fp32, in memory that the next call takes again where it is little enough to keep.

        Args:
            tensors: Dense ones.
            part: The number of the part of a step. Those of a part are alike in each step, as a rule.
        """
        usual = self._parts.setdefault(part, GradientLayout())
        wide = usual.recall(tensors)
        if wide is None:
            wide = self._in_memory(tensors)
            if wide is None:
                return widened(tensors)
            usual.learn(tensors, wide)
        torch._foreach_copy_(wide, list(tensors))
        return wide

    def _in_memory(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        sizes = [tensor.numel() for tensor in tensors]
        total = sum(sizes)
        limit = limit_of(total, on_cpu=True)
        if not total or total > limit or not all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
            return None
        if self._memory is None or self._memory.numel() < total:
            self._memory = torch.empty(limit, dtype=torch.float32, device="cpu")
            self._parts.clear()
        flat = self._memory[:total].split(sizes)
        return [part.view(tensor.shape) for part, tensor in zip(flat, tensors, strict=True)]


def limit_of(total: int, *, on_cpu: bool) -> int:
    """Return how many elements of so many are widened at a time."""
    return _ON_CPU * torch.get_num_threads() if on_cpu else min(_ELSEWHERE, max(_FEW, total // 2))
