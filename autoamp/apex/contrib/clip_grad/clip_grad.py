"""Clipping of gradients by their total norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from autoamp import core
from autoamp.errors import UsageError


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
    norm = core.total_norm(grads, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise UsageError(
            f"the total norm of the gradients is {float(norm)}, so they cannot be clipped; skip this step, or use "
            "error_if_nonfinite=False"
        )
    torch.nn.utils.clip_grads_with_norm_(every, float(max_norm), norm)
    return norm
