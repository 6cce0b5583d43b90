"""Steps of torch's fused Adam and AdamW by the operator that they end in.

What torch does around that operator, parameter by parameter in Python, takes longer than the step itself where
parameters are small or many. The state is the optimizer's own. What a parameter's first step makes of it torch makes,
and whatever is out of the ordinary is left to torch too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoamp import torch_private
from autoamp.stepping.half_gradients import raw_grad
from autoamp.tensors import are_dense_fp32

__all__ = ["step_directly"]

_STEPPED = frozenset((torch.optim.Adam, torch.optim.AdamW))
_names = operator.itemgetter("step", "exp_avg", "exp_avg_sq")


def step_directly(optimizer: Any) -> bool:
    """Do what the inner step of an optimizer does, where that is a fused Adam or AdamW. If not, nothing was written.

    Args:
        optimizer: Of any class; its very class decides.
    """
    if type(optimizer) not in _STEPPED:
        return False
    calls = []
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if raw_grad(param) is not None]
        if params:
            call = _call(optimizer, group, params)
            if call is None:
                return False
            calls.append(call)
    for call in calls:
        call()
    return True


def _call(optimizer: Any, group: dict[str, Any], params: list[Tensor]) -> Callable[[], None] | None:
    """Return what steps these parameters of a group; None where that is left to torch."""
    name = torch_private.FUSED_ADAMW if group["decoupled_weight_decay"] else torch_private.FUSED_ADAM
    betas, lr = group["betas"], group["lr"]
    is_usual = group["fused"] and not (group["amsgrad"] or group["differentiable"])
    if name is None or not is_usual or any(isinstance(number, Tensor) for number in (*betas, lr)):
        return None
    grads: list[Any] = list(map(raw_grad, params))
    device = params[0].device
    states = _states_of(optimizer, params)
    if not (are_dense_fp32(params, device) and are_dense_fp32(grads, device) and all(states)):
        return None
    if device.type == "cuda" and not group["capturable"] and torch.cuda.is_current_stream_capturing():
        # torch refuses this.
        return None
    steps, first, second = map(list, zip(*map(_names, states), strict=True))
    if steps[0].device != device:
        return None
    given = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
    scale, found_inf = [None if flag is None else flag.to(device, non_blocking=True) for flag in given]

    def call() -> None:
        _count(steps)
        getattr(torch, name)(
            params, grads, first, second, [], steps, amsgrad=False, lr=lr, beta1=betas[0], beta2=betas[1],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"], grad_scale=scale,
            found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    return call


def _states_of(optimizer: Any, params: list[Tensor]) -> list[Any]:
    """Return the state of each parameter, None of one that has not stepped."""
    known = optimizer.state
    if len(known) == len(params) and all(map(operator.is_, known, params)):
        # In this order, as a rule: a tensor's hash is a call of Python.
        return list(known.values())
    return list(map(known.get, params))


def _count(steps: list[Tensor]) -> None:
    if steps[0].is_cpu:
        # Of a number torch would make a tensor for each of them, in four times as long. Without alpha it is a number.
        torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1)
    else:
        torch._foreach_add_(steps, 1)
