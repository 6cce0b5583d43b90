"""The optimizer steps of `amp_C`: one call updates lists of parameters and their state in place.

Each takes ``(chunk_size, noop_flag, tensor_lists, ...)`` as the functions of `tensor_lists` do, and computes in fp32,
or in fp64 for fp64 tensors. Where ``noop_flag`` is not 0 nothing is done. To read the flag is to wait for the device;
the capturable functions do not. These alone write to gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoamp.apex import formulas
from autoamp.apex.amp_C.tensor_lists import TensorLists, checked
from autoamp.core import widened
from autoamp.errors import UsageError


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, wd: float, momentum: float, dampening: float,
    lr: float, nesterov: bool, first_run: bool, wd_after_momentum: bool, scale: float = 1.0,
) -> None:  # fmt: skip
    """Take a step of SGD with momentum: Sutskever et al. 2013, with the formula of `torch.optim.SGD`.

    Args:
        chunk_size: No effect.
        noop_flag: One element; nothing is done where it is set.
        tensor_lists: ``[grads, params, momentums]``, or with a fourth list of copies of the parameters in any dtype.
        wd: Weight decay, added to the gradient before or after the momentum, as ``wd_after_momentum`` says.
        momentum: The decay of the momentums. With 0 there is no momentum, and they stay as they are.
        dampening: Gradients are multiplied by ``1 - dampening`` before they are added to the momentums.
        lr: The learning rate.
        nesterov: Whether to use Nesterov's momentum.
        first_run: Whether this is the first step, where the momentums are set to the gradients.
        wd_after_momentum: See ``wd``.
        scale: The gradients are multiplied by it first.

    Raises:
        UsageError: The lists do not fit. Nothing was written.
    """
    names = ("grads", "params", "momentums", "copies")
    lists = checked("multi_tensor_sgd", tensor_lists, *names[: 4 if len(tensor_lists) == 4 else 3])
    copies, velocities = lists[3] if len(lists) == 4 else None, [lists[2]] if momentum else []
    _step(
        formulas.SGD.formula, noop_flag, [lists[1], lists[0], *velocities], copies, lr=lr, momentum=momentum,
        dampening=dampening, weight_decay=wd, nesterov=bool(nesterov and momentum),
        first=bool(first_run), decay_after_momentum=bool(wd_after_momentum), inv_scale=scale,
    )  # fmt: skip


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: float, beta1: float, beta2: float,
    epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Take a step of Adam (Kingma, Ba 2015, arXiv:1412.6980) or AdamW (Loshchilov, Hutter 2019, arXiv:1711.05101).

    Args:
        chunk_size: No effect.
        noop_flag: One element; nothing is done where it is set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``.
        lr: The learning rate.
        beta1: Decay of the average of the gradient.
        beta2: Decay of the average of its square.
        epsilon: Added to the root.
        step: The number of this step, from 1.
        mode: 0 adds the decay to the gradient, 1 is AdamW.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        weight_decay: The factor of the decay.

    Raises:
        UsageError: The lists do not fit, or the mode is unknown. Nothing was written.
    """
    lists = checked("multi_tensor_adam", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
    _check_mode("multi_tensor_adam", mode)
    _step(
        formulas.ADAM.formula, noop_flag, [lists[1], lists[0], *lists[2:]], lr=lr, beta1=beta1, beta2=beta2,
        eps=epsilon, step=step, decoupled=mode == 1, bias_correction=bool(bias_correction), weight_decay=weight_decay,
    )  # fmt: skip


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: Tensor, beta1: float, beta2: float,
    epsilon: float, step: Tensor, mode: int, bias_correction: int, weight_decay: float, inv_scale: Tensor,
) -> None:  # fmt: skip
    """Take a step of Adam or AdamW, as `multi_tensor_adam`, without waiting for the device.

    Args:
        chunk_size: No effect.
        noop_flag: One element; where it is set all tensors stay as they are.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``, or with a fifth list of masters, which are stepped and
            copied to the parameters. The gradients are multiplied by ``inv_scale`` in place.
        lr: The learning rate, one element.
        beta1: Decay of the average of the gradient.
        beta2: Decay of the average of its square.
        epsilon: Added to the root.
        step: The number of this step, from 1; one element.
        mode: 0 adds the decay to the gradient, 1 is AdamW.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        weight_decay: The factor of the decay.
        inv_scale: What the gradients are multiplied by first, one element.

    Raises:
        UsageError: The lists do not fit, or the mode is unknown. Nothing was written.
    """
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs", "masters")
    lists = checked("multi_tensor_adam_capturable", tensor_lists, *names[: 5 if len(tensor_lists) == 5 else 4])
    _check_mode("multi_tensor_adam_capturable", mode)
    grads, params, firsts, seconds, masters = lists if len(lists) == 5 else [*lists, lists[1]]
    if not grads:
        return
    device = grads[0].device
    number, count, factor, flag = (
        tensor.to(device, non_blocking=True).reshape(()) for tensor in (lr, step, inv_scale, noop_flag)
    )
    skip = flag != 0
    wide_grads = list(torch._foreach_mul(widened(grads), factor))
    # These are new tensors where the lists have half ones, which `write_back` copies them to below.
    values, first_values, second_values = widened(masters), widened(firsts), widened(seconds)
    formulas.adam_on_device_(
        values, wide_grads, first_values, second_values, lr=number, beta1=beta1, beta2=beta2, eps=epsilon, step=count,
        bias_correction=bias_correction, weight_decay=weight_decay, decoupled=mode == 1, found_inf=flag,
    )  # fmt: skip
    for tensors, new in zip((masters, firsts, seconds), (values, first_values, second_values), strict=True):
        formulas.write_back(tensors, new)
    formulas.write_back(grads, [torch.where(skip, grad, new) for grad, new in zip(grads, wide_grads, strict=True)])
    if params is not masters:
        formulas.write_back(params, [torch.where(skip, param, new) for param, new in zip(params, values, strict=True)])


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: float, beta1: float, beta2: float,
    epsilon: float, step: int, bias_correction: int, weight_decay: float, grad_averaging: int, mode: int,
    global_grad_norm: Tensor | float, max_grad_norm: float, use_nvlamb: bool | None = False,
) -> None:  # fmt: skip
    """Take a step of LAMB: You et al. 2020 (arXiv:1904.00962), with gradients clipped by their global norm.

    Args:
        chunk_size: No effect.
        noop_flag: One element; nothing is done where it is set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``.
        lr: The learning rate.
        beta1: Decay of the average of the gradient.
        beta2: Decay of the average of its square.
        epsilon: Added to the root.
        step: The number of this step, from 1.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        weight_decay: The factor of the decay.
        grad_averaging: Whether the gradient enters its average with ``1 - beta1``, or with 1.
        mode: 0 adds the decay to the gradient, 1 to the update.
        global_grad_norm: The norm of all gradients, a number or a tensor of one element.
        max_grad_norm: Gradients are scaled down to this norm; 0 or less for no clipping.
        use_nvlamb: Whether there is a trust ratio without weight decay too.

    Raises:
        UsageError: The lists do not fit, or the mode is unknown. Nothing was written.
    """
    lists = checked("multi_tensor_lamb", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
    _check_mode("multi_tensor_lamb", mode)
    _step(
        formulas.LAMB.formula, noop_flag, [lists[1], lists[0], *lists[2:]], lr=lr, beta1=beta1, beta2=beta2,
        eps=epsilon, step=step, bias_correction=bool(bias_correction), weight_decay=weight_decay, decoupled=mode == 1,
        grad_averaging=bool(grad_averaging), always_adapt=bool(use_nvlamb), max_norm=max(0.0, max_grad_norm),
        global_norm=_norm(global_grad_norm, lists[0]),
    )  # fmt: skip


@torch.no_grad()
def multi_tensor_lamb_stage1(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor_decay: Tensor, step: int,
    beta1: float, beta2: float, epsilon: float, global_grad_norm: Tensor | float, max_global_grad_norm: float,
) -> None:  # fmt: skip
    """Compute LAMB's updates (arXiv:1904.00962), not yet multiplied by their trust ratios.

    Args:
        chunk_size: No effect.
        noop_flag: One element; nothing is done where it is set.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs, updates]``; the last is written.
        per_tensor_decay: Shape ``(n,)``: the weight decay of each parameter.
        step: The number of steps before this one: from 0.
        beta1: Decay of the average of the gradient.
        beta2: Decay of the average of its square.
        epsilon: Added to the root.
        global_grad_norm: The norm of all gradients, a number or a tensor of one element.
        max_global_grad_norm: Gradients are scaled down to this norm; 0 or less for no clipping.

    Raises:
        UsageError: The lists do not fit. Nothing was written.
    """
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs", "updates")
    lists = checked("multi_tensor_lamb_stage1", tensor_lists, *names)
    grads, params, firsts, seconds, _ = (widened(tensors) for tensors in lists)
    if _nothing_to_do(noop_flag, grads):
        return
    grads = formulas.clipped(grads, _norm(global_grad_norm, grads), max_global_grad_norm)
    formulas.average_(grads, firsts, seconds, beta1, 1.0 - beta1, beta2)
    updates = formulas.adam_updates(firsts, seconds, formulas.corrections(beta1, beta2, step + 1, True), epsilon)
    decays = [decay.to(param) for decay, param in zip(per_tensor_decay.unbind(), params, strict=True)]
    torch._foreach_add_(updates, torch._foreach_mul(params, decays))
    for tensors, values in zip(lists[2:], (firsts, seconds, updates), strict=True):
        formulas.write_back(tensors, values)


@torch.no_grad()
def multi_tensor_lamb_stage2(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor, lr: float, weight_decay: float | None = None, use_nvlamb: bool | None = False,
) -> None:  # fmt: skip
    """Subtract LAMB's updates, times ``lr`` and their trust ratios ``|param| / |update|``, from the parameters.

    Args:
        chunk_size: No effect.
        noop_flag: One element; nothing is done where it is set.
        tensor_lists: ``[params, updates]``; the parameters are written.
        per_tensor_param_norm: Shape ``(n,)``. Where it is 0 the ratio is 1.
        per_tensor_update_norm: Shape ``(n,)``, likewise.
        lr: The learning rate.
        weight_decay: With 0 all ratios are 1, unless ``use_nvlamb``. With None, for callers from before there was this
            argument, they are not.
        use_nvlamb: See ``weight_decay``.

    Raises:
        UsageError: The lists do not fit. Nothing was written.
    """
    lists = checked("multi_tensor_lamb_stage2", tensor_lists, "params", "updates")
    params, updates = (widened(tensors) for tensors in lists)
    if _nothing_to_do(noop_flag, params):
        return
    updates = list(torch._foreach_mul(updates, lr))
    if weight_decay is None or weight_decay or use_nvlamb:
        formulas.trust_(updates, per_tensor_param_norm.unbind(), per_tensor_update_norm.unbind())
    torch._foreach_sub_(params, updates)
    formulas.write_back(lists[0], params)


def _step(
    formula: Callable[..., None], noop_flag: Tensor, lists: list[list[Tensor]], copies: list[Tensor] | None = None,
    **numbers: Any,
) -> None:  # fmt: skip
    """Step parameters, given their gradients and states, by a formula, unless the flag is set; set copies to them."""
    if _nothing_to_do(noop_flag, lists[0]):
        return
    values = [widened(tensors) for tensors in lists]
    formula(*values, **numbers)
    for place, (tensors, new) in enumerate(zip(lists, values, strict=True)):
        if place != 1:
            formulas.write_back(tensors, new)
    if copies is not None:
        formulas.write_back(copies, values[0])


def _nothing_to_do(noop_flag: Tensor, tensors: list[Tensor]) -> bool:
    return not tensors or bool(noop_flag.any())


def _check_mode(op: str, mode: int) -> None:
    if mode not in (0, 1):
        raise UsageError(f"{op}: mode={mode!r} is unknown; choose 0 or 1")


def _norm(norm: Tensor | float, grads: list[Tensor]) -> Tensor:
    """Return a norm as one fp32 element; 0 for nan, which leaves the gradients as they are."""
    one = torch.as_tensor(norm, dtype=torch.float32, device=grads[0].device if grads else None).reshape(())
    return torch.nan_to_num(one, nan=0.0, posinf=float("inf"))
