"""Steps of torch's optimizers by one kernel, which reads gradients as they are and writes masters, states and halves.

The state is the optimizer's own, in torch's layout. What a parameter's first step makes of it torch makes: a parameter
whose state is not there yet is left to torch, and so is whatever the kernels do not take. A training may go on with or
without kernels at any step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import kernels
from autoamp.scaling import Factor, kernel_factor
from autoamp.stepping.half_gradients import LeftHalf, raw_grad
from autoamp.tensors import without_grad

__all__ = ["step_by_kernels"]

_PLAIN = frozenset((Tensor, torch.nn.Parameter, LeftHalf))

_Row = tuple[Tensor, Any, Tensor | None, dict[str, Any]]

# The parameters, their gradients, their halves or None, and their states.
_Step = Callable[[Any, dict[str, Any], list[Tensor], list[Tensor], dict[str, Any], list[dict[str, Any]]], bool]


@without_grad
def step_by_kernels(
    optimizer: Any, halves: Mapping[int, Tensor], factor: Factor | None = None
) -> tuple[list[Tensor], bool]:
    """Step what kernels take of an optimizer's parameters, and set their halves to them.

    Args:
        optimizer: Of any class. None but those of torch that a kernel computes are stepped.
        halves: The half parameters of masters, by ``id(master)``. Gradients that wait are read there.
        factor: What makes true gradients of those that wait; None where they are true.

    Returns:
        The parameters that were stepped, and whether others have gradients.
    """
    known = _KNOWN.get(type(optimizer))
    stepped: list[Tensor] = []
    left = False
    if known is None or getattr(optimizer, "grad_scale", None) is not None:
        return stepped, True
    is_ready, step = known
    found_inf = getattr(optimizer, "found_inf", None)
    for group in optimizer.param_groups:
        kinds: dict[Any, list[_Row]] = {}
        for row in _rows(optimizer, group["params"], halves):
            param, grad, half, state = row
            if type(param) not in _PLAIN or param.dtype is not torch.float32 or not is_ready(group, state):
                left = True
                continue
            kind = param.device, grad.dtype, None if half is None else half.dtype, type(param) is LeftHalf
            if kind in kinds:
                kinds[kind].append(row)
            else:
                kinds[kind] = [row]
        for (device, _, narrow, waits), rows in kinds.items():
            package = kernels.opened(device.type)
            if package is None or not _is_plain(group, device, found_inf):
                left = True
                continue
            params, grads, copies, states = map(list, zip(*rows, strict=True))
            # With halves or without: those of one kind have them alike.
            how = {"halves": None if narrow is None else copies, "found_inf": found_inf}
            if waits:
                how |= kernel_factor(factor, device)
            if step(package, group, params, grads, how, states):
                stepped += params
            else:
                left = True
    return stepped, left


def _rows(optimizer: Any, params: Sequence[Tensor], halves: Mapping[int, Tensor]) -> list[_Row]:
    """Return those of a group's parameters that have gradients: each with its gradient, its half and its state."""
    own = list(map(halves.get, map(id, params)))
    holders = [
        half if half is not None and type(param) is LeftHalf else param for param, half in zip(params, own, strict=True)
    ]
    states = map(optimizer.state.get, params, itertools.repeat({}))
    return [row for row in zip(params, map(raw_grad, holders), own, states, strict=True) if row[1] is not None]


def _is_plain(group: dict[str, Any], device: torch.device, found_inf: Tensor | None) -> bool:
    """Tell whether a group asks for nothing of torch's that a kernel does not do."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device != device and lr.device.type != "cpu":
        return False
    if device.type == "cuda" and not group.get("capturable") and torch.cuda.is_current_stream_capturing():
        # torch refuses this.
        return False
    return not group.get("differentiable") and (found_inf is None or bool(group.get("fused")))


def _rate(group: dict[str, Any], param: Tensor) -> Any:
    lr = group["lr"]
    return lr if isinstance(lr, Tensor) and lr.device == param.device and lr.dtype is torch.float32 else float(lr)


def _column(states: Sequence[dict[str, Any]], name: str) -> list[Tensor]:
    return [state[name] for state in states]


def _adam_is_ready(group: dict[str, Any], state: dict[str, Any]) -> bool:
    return "step" in state and (not group["amsgrad"] or "max_exp_avg_sq" in state)


def _adam(
    package: Any, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], how: dict[str, Any],
    states: list[dict[str, Any]],
) -> bool:  # fmt: skip
    """`torch.optim.Adam` and `torch.optim.AdamW`."""
    steps = _column(states, "step")
    beta1, beta2 = group["betas"]
    if steps[0].device != params[0].device or isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        return False
    return kernels.attempt(
        package.adam_, params, grads, _column(states, "exp_avg"), _column(states, "exp_avg_sq"),
        max_exp_avg_sqs=_column(states, "max_exp_avg_sq") if group["amsgrad"] else None, step=steps, advance=True,
        lr=_rate(group, params[0]), beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
        decoupled=bool(group["decoupled_weight_decay"]), maximize=group["maximize"], **how,
    )  # fmt: skip


def _sgd_is_ready(group: dict[str, Any], state: dict[str, Any]) -> bool:
    return not group["momentum"] or state.get("momentum_buffer") is not None


def _sgd(
    package: Any, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], how: dict[str, Any],
    states: list[dict[str, Any]],
) -> bool:  # fmt: skip
    """`torch.optim.SGD`."""
    return kernels.attempt(
        package.sgd_, params, grads, _column(states, "momentum_buffer") if group["momentum"] else None,
        lr=_rate(group, params[0]), momentum=group["momentum"], dampening=group["dampening"],
        weight_decay=group["weight_decay"], nesterov=group["nesterov"], maximize=group["maximize"], **how,
    )  # fmt: skip


def _adagrad_is_ready(group: dict[str, Any], state: dict[str, Any]) -> bool:
    return "sum" in state and not group["lr_decay"]


def _adagrad(
    package: Any, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], how: dict[str, Any],
    states: list[dict[str, Any]],
) -> bool:  # fmt: skip
    """`torch.optim.Adagrad` with a learning rate that does not decay."""
    if how["found_inf"] is not None:
        # A skipped step would be counted.
        return False
    taken = kernels.attempt(
        package.adagrad_, params, grads, _column(states, "sum"), lr=_rate(group, params[0]), eps=group["eps"],
        weight_decay=group["weight_decay"], maximize=group["maximize"], **how,
    )  # fmt: skip
    if taken:
        torch._foreach_add_(_column(states, "step"), 1)
    return taken


_KNOWN: dict[type[Any], tuple[Callable[[dict[str, Any], dict[str, Any]], bool], _Step]] = {
    torch.optim.Adam: (_adam_is_ready, _adam),
    torch.optim.AdamW: (_adam_is_ready, _adam),
    torch.optim.SGD: (_sgd_is_ready, _sgd),
    torch.optim.Adagrad: (_adagrad_is_ready, _adagrad),
}
