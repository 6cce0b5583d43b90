"""Optimizer steps in one pass: gradients read as they are, fp32 parameters and states updated, half copies written.

They write in place and do not take part in autograd. Lists are parallel: one tensor for each parameter, of its size.
Tensors must be dense, all lists on one device, each list of one dtype, and nothing that is written may share memory
with anything else; otherwise an `ArgumentError` names the tensor, and nothing is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp_kernels.library import ArgumentError, StepArgs, call
from autoamp_kernels.lists import CODES, Tables, Tensors, address, tables

__all__ = ["adam_", "lamb_", "sgd_"]

_DECOUPLED, _NO_BIAS_CORRECTION, _EPS_INSIDE, _NESTEROV, _FIRST, _DECAY_AFTER, _TRUST = (1 << bit for bit in range(7))


def adam_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *, lr: float | Tensor, beta1: float,
    beta2: float, eps: float, weight_decay: float = 0.0, step: float | Tensor, halves: Tensors | None = None,
    decoupled: bool = True, bias_correction: bool = True, eps_inside_sqrt: bool = False,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Step by Adam or AdamW, as `torch.optim.Adam` and `torch.optim.AdamW` do. For GPUs.

    Sources: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2019, arXiv:1711.05101,
    algorithm 2.

    Args:
        params: Parameters, fp32, or half ones without ``halves``; computed in fp32.
        grads: Their gradients: fp32, fp16 or bf16. They are not written to.
        exp_avgs: The averages of the gradients, fp32.
        exp_avg_sqs: The averages of their squares, fp32.
        lr: The learning rate: a number, or one fp32 element on the parameters' device.
        beta1: The decay of ``exp_avgs``.
        beta2: The decay of ``exp_avg_sqs``.
        eps: Added to the root of the second average.
        weight_decay: The factor of the parameter in the decay.
        step: The number of this step, from 1: a number, or one element (fp32 or int32) on the parameters' device.
        halves: fp16 or bf16 tensors that are set to the new parameters; None for none.
        decoupled: Whether the decay is AdamW's. If not, it is added to the gradient.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        eps_inside_sqrt: Whether ``eps`` is added under the root.
        found_inf: One fp32 element. Unless it is 0, nothing is written. None for 0.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There is no such kernel for this device, or it failed.
    """
    flags = _DECOUPLED * decoupled | _NO_BIAS_CORRECTION * (not bias_correction) | _EPS_INSIDE * eps_inside_sqrt
    _run(
        "adam", (params, grads, halves, exp_avgs, exp_avg_sqs), flags, lr, found_inf, step=step, beta1=beta1,
        beta2=beta2, eps=eps, weight_decay=weight_decay,
    )  # fmt: skip


def sgd_(
    params: Tensors, grads: Tensors, momentum_buffers: Tensors | None = None, *, lr: float | Tensor,
    momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
    first: bool = False, decay_after_momentum: bool = False, halves: Tensors | None = None, inv_scale: float = 1.0,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Step by SGD with momentum (Sutskever et al. 2013, ICML 28, p. 1139), as `torch.optim.SGD` does. For GPUs.

    Args:
        params: As in `adam_`, as all that is not named here.
        grads: Their gradients.
        momentum_buffers: The velocities, fp32; None without momentum.
        lr: The learning rate.
        momentum: The decay of the velocities.
        dampening: ``1 - dampening`` is the factor of the gradient in the velocity.
        weight_decay: The factor of the parameter in the decay.
        nesterov: Whether the momentum is Nesterov's.
        first: Whether the buffers hold nothing yet. They are set to the gradients then.
        decay_after_momentum: Whether the decay is added to the velocity. If not, it is added to the gradient.
        halves: Half tensors that are set to the new parameters.
        inv_scale: A factor of the gradients.
        found_inf: Unless it is 0, nothing is written.

    Raises:
        ArgumentError: A tensor that the kernel cannot take; a momentum without ``momentum_buffers``.
        KernelError: There is no such kernel for this device, or it failed.
    """
    if momentum and params and not momentum_buffers:
        raise ArgumentError(f"sgd: momentum={momentum} wants momentum_buffers; give one for each parameter")
    flags = _NESTEROV * nesterov | _FIRST * first | _DECAY_AFTER * decay_after_momentum
    _run(
        "sgd", (params, grads, halves, momentum_buffers, None), flags, lr, found_inf, beta1=momentum,
        weight=1.0 - dampening, weight_decay=weight_decay, inv_scale=inv_scale,
    )  # fmt: skip


def lamb_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *, lr: float | Tensor, beta1: float,
    beta2: float, eps: float, weight_decay: float = 0.0, step: float | Tensor, halves: Tensors | None = None,
    decoupled: bool = True, bias_correction: bool = True, grad_averaging: bool = True, always_adapt: bool = False,
    global_norm: Tensor | None = None, max_norm: float = 0.0, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Step by LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2, where phi is the identity). For CPUs and GPUs.

    A trust ratio is ``|parameter| / |update|``, or 1 where either is 0. Without trust ratios one pass does all of it.

    Args:
        params: As in `adam_`, as all that is not named here.
        grads: Their gradients.
        exp_avgs: The averages of the gradients.
        exp_avg_sqs: The averages of their squares.
        lr: The learning rate.
        beta1: The decay of ``exp_avgs``.
        beta2: The decay of ``exp_avg_sqs``.
        eps: Added to the root of the second average.
        weight_decay: The factor of the parameter in the decay.
        step: The number of this step.
        halves: Half tensors that are set to the new parameters.
        decoupled: Whether the decay is added to the update, as in the paper. If not, it is added to the gradient.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        grad_averaging: Whether the weight of a gradient in its average is ``1 - beta1``. If not, it is 1.
        always_adapt: Whether there are trust ratios without a weight decay too.
        global_norm: One fp32 element, the 2-norm of all gradients; None for no clipping.
        max_norm: Gradients are divided by ``global_norm / max_norm`` where that is above 1; 0 for no clipping.
        found_inf: Unless it is 0, nothing is written.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There is no such kernel for this device, or it failed.
    """
    flags = _DECOUPLED * decoupled | _NO_BIAS_CORRECTION * (not bias_correction)
    flags |= _TRUST * bool(weight_decay or always_adapt)
    _run(
        "lamb", (params, grads, halves, exp_avgs, exp_avg_sqs), flags, lr, found_inf, global_norm, step=step,
        beta1=beta1, beta2=beta2, eps=eps, weight=1.0 - beta1 if grad_averaging else 1.0, weight_decay=weight_decay,
        max_norm=max_norm,
    )  # fmt: skip


def _run(
    kernel: str, given: tuple[Tensors | None, ...], flags: int, lr: float | Tensor, found_inf: Tensor | None,
    global_norm: Tensor | None = None, *, step: float | Tensor = 0, inv_scale: float = 1.0, **numbers: float,
) -> None:  # fmt: skip
    names = ("params", "grads", "halves", "state1", "state2")
    lists = {name: some for name, some in zip(names, given, strict=True) if some is not None}
    params = lists["params"]
    if not params:
        return
    made = tables(kernel, lists)
    if "halves" in lists and params[0].dtype is not torch.float32:
        raise ArgumentError(f"{kernel}: halves are given, and params are {params[0].dtype}; give halves=None")
    args: Any = StepArgs(inv_scale=inv_scale, flags=flags, **numbers)
    args.grad_dtype, args.param_dtype = CODES[lists["grads"][0].dtype], CODES[params[0].dtype]
    args.half_dtype = CODES[lists["halves"][0].dtype] if "halves" in lists else -1
    if isinstance(lr, Tensor):
        args.lr_at = address(kernel, "lr", lr, made.device, torch.float32)
    else:
        args.lr = lr
    if isinstance(step, Tensor):
        args.step_at = address(kernel, "step", step, made.device, torch.float32, torch.int32)
        args.step_dtype = CODES[step.dtype]
    else:
        args.step = step
    args.found_inf = address(kernel, "found_inf", found_inf, made.device, torch.float32)
    args.global_norm = address(kernel, "global_norm", global_norm, made.device, torch.float32)
    _launch(kernel, args, made)
    # Autograd must see that they were written; no graph has saved an optimizer's states.
    written = [one for name in ("params", "halves") for one in lists.get(name, ()) if not one.is_inference()]
    torch.autograd.graph.increment_version(written)


def _launch(kernel: str, args: Any, made: Tables) -> None:
    for name, pointers in made.pointers.items():
        setattr(args, name, pointers.buffer_info()[0])
    args.counts, args.first_chunk = made.counts.buffer_info()[0], made.first_chunk.buffer_info()[0]
    args.tensors, args.chunks, args.threads = len(made.counts), made.first_chunk[-1], torch.get_num_threads()
    if args.flags & _TRUST:
        # It is ours until the call returns; after that the order of the stream keeps it.
        space = torch.empty(2 * args.chunks + args.tensors, dtype=torch.float64, device=made.device)
        args.space = space.data_ptr()
    args.device = -1
    if made.device.type == "cuda":
        args.device = torch.cuda.current_device() if made.device.index is None else made.device.index
        args.stream = torch.cuda.current_stream(made.device).cuda_stream
    call(made.device.type, kernel, args)
