"""Gradients as they are now, after whatever reduced them: what is looked at where several ranks have a part in them.

A rank knows what its own backward passes found. A reduction may bring inf and nan from other ranks. So all ranks look
at what came out of it, and step or skip alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autoamp.scaling.agreement import Together
from autoamp.scaling.gradients import DeviceAndDtype, UsualGradients, total_norm, unscale_
from autoamp.scaling.shards import local_of

__all__ = ["clip_", "clip_coefficient", "non_finite_now", "powered_norm"]


def non_finite_now(params: Iterable[Tensor], usual: UsualGradients | None = None) -> list[Tensor]:
    """Look for inf and nan in every ``param.grad``, in this rank's part of it, in one pass over them.

    Args:
        params: The parameters, of which those without gradients are passed over.
        usual: As for `autoamp.scaling.unscale_`.

    Returns:
        Flags as `autoamp.scaling.unscale_` returns them.
    """
    return unscale_(params, 1.0, usual)


@torch.no_grad()
def powered_norm(params: Sequence[Tensor], together: Together | None, norm_type: float) -> Tensor:
    """Return the p-th power of the norm of this rank's part of all gradients, so that those of all ranks add up.

    What several ranks have alike is divided by their number. For ``inf`` it is the largest absolute value.

    Args:
        params: Those of which the gradients count.
        together: Whose parts are added, None for this rank's alone.
        norm_type: The p of the p-norm, above 0.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            copies = 1 if together is None else together.copies_of(param.grad)
            by_copies.setdefault(copies, []).append(local_of(param.grad))
    norms = {copies: total_norm(grads, norm_type) for copies, grads in by_copies.items()}
    if not norms:
        return torch.zeros(())
    device = next(iter(norms.values())).device
    if norm_type == torch.inf:
        return torch.stack([norm.to(device) for norm in norms.values()]).amax()
    return torch.stack([norm.to(device) ** norm_type / copies for copies, norm in norms.items()]).sum()


@torch.no_grad()
def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return by what `clip_` multiplies, without dimensions; the arguments are those of `clip_`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return torch.where(norm.isfinite(), factor, 1.0)


@torch.no_grad()
def clip_(params: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients in place by ``max_norm / (norm + 1e-6)`` where that is below 1, by the rule of
    `torch.nn.utils.clip_grad_norm_`. A norm that is inf or nan leaves them.

    Args:
        params: Those whose gradients are meant.
        norm: The norm of all of them, without dimensions.
        max_norm: The highest norm.
    """
    factor = clip_coefficient(norm, max_norm)
    by_kind: dict[DeviceAndDtype, list[Tensor]] = {}
    for grad in {id(param.grad): param.grad for param in params if param.grad is not None}.values():
        local = local_of(grad)
        by_kind.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), grads in by_kind.items():
        torch._foreach_mul_(grads, factor.to(device=device, dtype=dtype))
