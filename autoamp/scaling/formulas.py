"""The arithmetic of the optimizers, in place on lists of tensors that are in fp32 or fp64.

Sources: Adam, Kingma and Ba 2015 (arXiv:1412.6980); LAMB, You et al. 2020 (arXiv:1904.00962); NovoGrad, Ginsburg et al.
2019 (arXiv:1905.11286); Adagrad, Duchi et al. 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "adagrad_",
    "adam_on_device_",
    "adam_updates",
    "average_",
    "blended_norms",
    "corrections",
    "gradient_norms",
    "novograd_",
    "trust_",
]


def corrections(beta1: float, beta2: float, step: int, wanted: Any) -> tuple[float, float]:
    """Return ``1 - beta ** step`` for both averages; 1 where no correction is wanted."""
    return (1.0 - beta1**step, 1.0 - beta2**step) if wanted else (1.0, 1.0)


def average_(
    grads: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], beta1: float, weight: float, beta2: float
) -> None:
    """Let gradients enter their averages with ``weight``, and their squares with ``1 - beta2``."""
    torch._foreach_mul_(firsts, beta1)
    torch._foreach_add_(firsts, grads, alpha=weight)
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_addcmul_(seconds, grads, grads, 1.0 - beta2)


def adam_updates(
    firsts: list[Tensor], seconds: list[Tensor], biases: tuple[float, float], eps: float, *, eps_inside_sqrt: bool
) -> list[Tensor]:
    """Return the first averages by the root of the second, both corrected; ``eps`` is added to the root or under it."""
    roots = list(torch._foreach_div(seconds, biases[1]))
    if eps_inside_sqrt:
        torch._foreach_add_(roots, eps)
    torch._foreach_sqrt_(roots)
    if not eps_inside_sqrt:
        torch._foreach_add_(roots, eps)
    updates = list(torch._foreach_div(firsts, biases[0]))
    torch._foreach_div_(updates, roots)
    return updates


def adam_on_device_(
    values: list[Tensor], grads: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], *, lr: Tensor, beta1: float,
    beta2: float, eps: float, step: Tensor, bias_correction: Any, decay: float, decoupled: bool, skip: Tensor,
    eps_inside_sqrt: bool = False,
) -> None:  # fmt: skip
    """Step by Adam with numbers that lie on the device, so that nobody waits for it and a CUDA graph can hold it.

    Args:
        values: The parameters.
        grads: Their gradients, which stay as they are.
        firsts: The averages.
        seconds: The averages of squares.
        lr: The learning rate, without dimensions, as are the other tensors.
        beta1: The decay of ``firsts``.
        beta2: The decay of ``seconds``.
        eps: Added to the root of the second average.
        step: The number of this step, from 1.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        decay: The weight decay.
        decoupled: Whether the decay is AdamW's, or added to the gradient.
        skip: A bool. Where it is set all stays as it is, whatever the gradients hold.
        eps_inside_sqrt: Whether ``eps`` is added under the root.
    """

    def or_else(neutral: float, value: Tensor | float) -> Tensor:
        return torch.where(skip, neutral, value)

    def corrected(averages: list[Tensor], beta: float) -> list[Tensor]:
        if not bias_correction:
            return [average.clone() for average in averages]
        # 1 - beta ** step, without the digits that the difference would lose in fp32.
        bias = -torch.expm1(step.float() * (math.log(beta) if beta else -math.inf))
        return list(torch._foreach_div(averages, or_else(1.0, bias)))

    if decay and not decoupled:
        grads = list(torch._foreach_add(grads, values, alpha=decay))
    # Not a product with 0, which leaves nan where a gradient is inf or nan.
    grads = [grad.masked_fill(skip, 0.0) for grad in grads]
    torch._foreach_mul_(firsts, or_else(1.0, beta1))
    torch._foreach_add_(firsts, torch._foreach_mul(grads, or_else(0.0, 1.0 - beta1)))
    torch._foreach_mul_(seconds, or_else(1.0, beta2))
    torch._foreach_add_(seconds, torch._foreach_mul(torch._foreach_mul(grads, grads), or_else(0.0, 1.0 - beta2)))
    # A multi-tensor sum with a tensor waits for the device. Only without an eps is there a division by 0 to fear.
    small = eps if isinstance(eps, float) and eps > 0.0 else or_else(1.0, eps)
    roots = corrected(seconds, beta2)
    if eps_inside_sqrt:
        torch._foreach_add_(roots, small)
    torch._foreach_sqrt_(roots)
    if not eps_inside_sqrt:
        torch._foreach_add_(roots, small)
    updates = corrected(firsts, beta1)
    torch._foreach_div_(updates, roots)
    if decay and decoupled:
        torch._foreach_add_(updates, values, alpha=decay)
    torch._foreach_mul_(updates, or_else(0.0, -lr))
    torch._foreach_add_(values, updates)


def trust_(updates: list[Tensor], value_norms: Sequence[Tensor], update_norms: Sequence[Tensor]) -> None:
    """Multiply each update by ``|value| / |update|``; by 1 where either is 0."""
    ratios = []
    for update, value_norm, update_norm in zip(updates, value_norms, update_norms, strict=True):
        both = (value_norm != 0) & (update_norm != 0)
        ratios.append(torch.where(both, value_norm / update_norm, 1.0).to(update))
    torch._foreach_mul_(updates, ratios)


def adagrad_(
    values: list[Tensor], grads: list[Tensor], sums: list[Tensor], *, lr: float, eps: float, decay: float,
    decoupled: bool,
) -> None:  # fmt: skip
    """Step by gradients over the root of the sum of their squares. The decay is decoupled, or added to the gradient."""
    if decay and not decoupled:
        grads = list(torch._foreach_add(grads, values, alpha=decay))
    torch._foreach_addcmul_(sums, grads, grads, 1.0)
    roots = torch._foreach_sqrt(sums)
    torch._foreach_add_(roots, eps)
    updates = list(torch._foreach_div(grads, roots))
    if decay and decoupled:
        torch._foreach_add_(updates, values, alpha=decay)
    torch._foreach_add_(values, updates, alpha=-lr)


def gradient_norms(grads: list[Tensor], norm_type: int) -> list[Tensor]:
    """Return the 2-norm of each gradient, or for ``norm_type=0`` its largest absolute value; 0 of an empty one."""
    kinds = [2.0 if norm_type == 2 or grad.numel() == 0 else float("inf") for grad in grads]
    return [torch._foreach_norm([grad], kind)[0] for grad, kind in zip(grads, kinds, strict=True)]


def blended_norms(norms: Tensor, new: Tensor, beta2: float, norm_type: int) -> Tensor:
    """Return averages that new norms have entered: root mean squares of 2-norms, means of largest values."""
    if norm_type == 2:
        return (beta2 * norms**2 + (1.0 - beta2) * new**2).sqrt()
    return norms.lerp(new, 1.0 - beta2)


def novograd_(
    values: list[Tensor], grads: list[Tensor], firsts: list[Tensor], norms: list[Tensor], *, lr: float, beta1: float,
    weight: float, biases: tuple[float, float], eps: float, decay: float, inside: bool,
) -> None:  # fmt: skip
    """Step by the average of normalised gradients, which enter it with ``weight``.

    Args:
        values: The parameters.
        grads: Their gradients.
        firsts: The averages.
        norms: The averaged norm of each gradient.
        lr: The learning rate.
        beta1: The decay of the averages.
        weight: With what a gradient enters its average.
        biases: What the averages are divided by; the norms are divided by the root of the second.
        eps: Added to the norms.
        decay: The weight decay.
        inside: Whether gradients are normalised and decayed before they enter the average, or the average is.
    """
    scales = [(norm / biases[1] ** 0.5 + eps).to(grad) for norm, grad in zip(norms, grads, strict=True)]
    if inside:
        grads = list(torch._foreach_div(grads, scales))
        torch._foreach_add_(grads, values, alpha=decay)
    torch._foreach_mul_(firsts, beta1)
    torch._foreach_add_(firsts, grads, alpha=weight)
    updates = list(torch._foreach_div(firsts, biases[0]))
    if not inside:
        torch._foreach_div_(updates, scales)
        torch._foreach_add_(updates, values, alpha=decay)
    torch._foreach_add_(values, updates, alpha=-lr)
