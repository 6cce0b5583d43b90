"""Optimizer steps in one pass: gradients read as they are, fp32 parameters and states updated, half copies written.

The functions that end in ``_`` write in place and do not take part in autograd. Lists are parallel: one tensor for each
parameter, of its size. Tensors must be dense, all lists on one device, each list of one dtype, and nothing that is
written may share memory with anything else; otherwise an `ArgumentError` names the tensor, and nothing is changed.
"""

from __future__ import annotations

from torch import Tensor

from autoamp_kernels.abi import (
    DECAY_AFTER,
    DECOUPLED,
    EPS_INSIDE,
    FIRST,
    MAXIMIZE,
    NESTEROV,
    NO_BIAS_CORRECTION,
    AdagradArgs,
    AdamArgs,
    SgdArgs,
)
from autoamp_kernels.calls import by_operator, launch, tables
from autoamp_kernels.errors import ArgumentError
from autoamp_kernels.operators import define
from autoamp_kernels.steps import (
    GRADS,
    HALVES,
    PARAMS,
    STEPS,
    Tensors,
    fill_step,
    split_rate,
    split_step,
    started,
    state,
)

__all__ = ["adagrad_", "adam_", "sgd_"]


def adam_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *, lr: float | Tensor, beta1: float,
    beta2: float, eps: float, weight_decay: float = 0.0, step: float | Tensor | Tensors, halves: Tensors | None = None,
    max_exp_avg_sqs: Tensors | None = None, decoupled: bool = True, maximize: bool = False,
    bias_correction: bool = True, eps_inside_sqrt: bool = False, advance: bool = False, inv_scale: float = 1.0,
    grad_scale: Tensor | None = None, grad_factor: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Step by Adam, AdamW or AMSGrad, as `torch.optim.Adam` and `torch.optim.AdamW` do.

    Sources: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2019, arXiv:1711.05101,
    algorithm 2; Reddi et al. 2018, arXiv:1904.09237.

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
        step: The number of this step, from 1: a number; one element (fp32, int32 or int64) on the parameters' device;
            or a list of fp32 tensors of one element, as `torch.optim` keeps them.
        halves: fp16 or bf16 tensors that are set to the new parameters; None for none.
        max_exp_avg_sqs: The largest ``exp_avg_sqs`` so far, fp32, for AMSGrad; None without.
        decoupled: Whether the decay is AdamW's. If not, it is added to the gradient.
        maximize: Whether the sign of the gradients is turned.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        eps_inside_sqrt: Whether ``eps`` is added under the root.
        advance: Whether the tensors in ``step`` are increased by 1 first, unless the step is skipped.
        inv_scale: A factor of the gradients.
        grad_scale: One fp32 element by which the gradients are divided; None for 1.
        grad_factor: One fp32 element by which the gradients are multiplied; None for 1.
        found_inf: One fp32 element. Unless it is 0, nothing is written. None for 0.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There are no kernels for this device.
    """
    if not params:
        return
    steps, step_at, number = split_step(step)
    lr_at, rate = split_rate(lr)
    flags = DECOUPLED * decoupled | MAXIMIZE * maximize | NO_BIAS_CORRECTION * (not bias_correction)
    flags |= EPS_INSIDE * eps_inside_sqrt
    lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or [], halves or [], steps)
    run = _adam_operator if by_operator((params, grads, halves)) else _adam
    run(
        *lists, step_at, lr_at, grad_scale, grad_factor, found_inf, rate, beta1, beta2,
        eps, weight_decay, number, inv_scale, flags, advance,
    )  # fmt: skip


_ADAM = (
    PARAMS, GRADS, state("exp_avgs"), state("exp_avg_sqs"), state("max_exp_avg_sqs"), HALVES, STEPS,
)  # fmt: skip


def _adam(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors,
    halves: Tensors, steps: Tensors, step_at: Tensor | None, lr_at: Tensor | None, grad_scale: Tensor | None,
    grad_factor: Tensor | None, found_inf: Tensor | None, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: float, inv_scale: float, flags: int, advance: bool,
) -> None:  # fmt: skip
    lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or None, halves or None, steps or None)
    table = tables.table("adam", _ADAM, lists)
    args = started("adam", AdamArgs, table, found_inf, inv_scale, grad_scale, grad_factor, lr_at, lr)
    fill_step("adam", args, table, step, step_at, advance)
    args.beta1, args.beta2, args.eps, args.weight_decay = beta1, beta2, eps, weight_decay
    args.flags = flags
    launch("adam", args, table.device, (params, halves))


_adam_operator = define(
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] halves, Tensor(f!)[] steps, Tensor(g!)? step_at, Tensor? lr_at, "
    "Tensor? grad_scale, Tensor? grad_factor, Tensor? found_inf, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, float step, float inv_scale, int flags, bool advance) -> ()",
    _adam,
)


def sgd_(
    params: Tensors, grads: Tensors, momentum_buffers: Tensors | None = None, *, lr: float | Tensor,
    momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
    maximize: bool = False, first: bool = False, decay_after_momentum: bool = False, halves: Tensors | None = None,
    inv_scale: float = 1.0, grad_scale: Tensor | None = None, grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Step by SGD with momentum (Sutskever et al. 2013, ICML 28, p. 1139), as `torch.optim.SGD` does.

    What is not named here is as in `adam_`.

    Args:
        params: Parameters, fp32, or half ones without ``halves``; computed in fp32.
        grads: Their gradients: fp32, fp16 or bf16. They are not written to.
        momentum_buffers: The velocities, fp32; None without momentum.
        lr: The learning rate: a number, or one fp32 element on the parameters' device.
        momentum: The decay of the velocities.
        dampening: ``1 - dampening`` is the factor of the gradient in the velocity.
        weight_decay: The factor of the parameter in the decay.
        nesterov: Whether the momentum is Nesterov's.
        maximize: Whether the sign of the gradients is turned.
        first: Whether the buffers hold nothing yet. They are set to the gradients then.
        decay_after_momentum: Whether the decay is added to the velocity. If not, it is added to the gradient.
        halves: fp16 or bf16 tensors that are set to the new parameters; None for none.
        inv_scale: A factor of the gradients.
        grad_scale: One fp32 element by which the gradients are divided; None for 1.
        grad_factor: One fp32 element by which the gradients are multiplied; None for 1.
        found_inf: One fp32 element. Unless it is 0, nothing is written. None for 0.

    Raises:
        ArgumentError: A tensor that the kernel cannot take; a momentum without ``momentum_buffers``.
        KernelError: There are no kernels for this device.
    """
    if not params:
        return
    if momentum and not momentum_buffers:
        raise ArgumentError(f"sgd: momentum={momentum} wants momentum_buffers; give one for each parameter")
    lr_at, rate = split_rate(lr)
    flags = MAXIMIZE * maximize | NESTEROV * nesterov | FIRST * first | DECAY_AFTER * decay_after_momentum
    lists = (params, grads, momentum_buffers or [], halves or [])
    run = _sgd_operator if by_operator((params, grads, halves)) else _sgd
    run(
        *lists, lr_at, grad_scale, grad_factor, found_inf, rate, momentum, dampening,
        weight_decay, inv_scale, flags,
    )  # fmt: skip


_SGD = (PARAMS, GRADS, state("buffers"), HALVES)


def _sgd(
    params: Tensors, grads: Tensors, buffers: Tensors, halves: Tensors, lr_at: Tensor | None,
    grad_scale: Tensor | None, grad_factor: Tensor | None, found_inf: Tensor | None, lr: float, momentum: float,
    dampening: float, weight_decay: float, inv_scale: float, flags: int,
) -> None:  # fmt: skip
    table = tables.table("sgd", _SGD, (params, grads, buffers or None, halves or None))
    args = started("sgd", SgdArgs, table, found_inf, inv_scale, grad_scale, grad_factor, lr_at, lr)
    args.momentum, args.dampening, args.weight_decay = momentum, dampening, weight_decay
    args.flags = flags
    launch("sgd", args, table.device, (params, halves))


_sgd_operator = define(
    "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] buffers, Tensor(c!)[] halves, Tensor? lr_at, "
    "Tensor? grad_scale, Tensor? grad_factor, Tensor? found_inf, float lr, float momentum, float dampening, "
    "float weight_decay, float inv_scale, int flags) -> ()",
    _sgd,
)


def adagrad_(
    params: Tensors, grads: Tensors, sums: Tensors, *, lr: float | Tensor, eps: float, weight_decay: float = 0.0,
    decoupled: bool = False, maximize: bool = False, halves: Tensors | None = None, inv_scale: float = 1.0,
    grad_scale: Tensor | None = None, grad_factor: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Step by Adagrad (Duchi, Hazan and Singer 2011, JMLR 12, p. 2121), as `torch.optim.Adagrad` does.

    What is not named here is as in `adam_`.

    Args:
        params: Parameters, fp32, or half ones without ``halves``; computed in fp32.
        grads: Their gradients: fp32, fp16 or bf16. They are not written to.
        sums: The sums of squared gradients, fp32.
        lr: The learning rate: a number, or one fp32 element on the parameters' device. Where it decays it is that of
            this step.
        eps: Added to the root of the sum.
        weight_decay: The factor of the parameter in the decay.
        decoupled: Whether the decay is decoupled, as AdamW's. If not, it is added to the gradient.
        maximize: Whether the sign of the gradients is turned.
        halves: fp16 or bf16 tensors that are set to the new parameters; None for none.
        inv_scale: A factor of the gradients.
        grad_scale: One fp32 element by which the gradients are divided; None for 1.
        grad_factor: One fp32 element by which the gradients are multiplied; None for 1.
        found_inf: One fp32 element. Unless it is 0, nothing is written. None for 0.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There are no kernels for this device.
    """
    if not params:
        return
    lr_at, rate = split_rate(lr)
    lists = (params, grads, sums, halves or [])
    run = _adagrad_operator if by_operator((params, grads, halves)) else _adagrad
    run(
        *lists, lr_at, grad_scale, grad_factor, found_inf, rate, eps, weight_decay,
        inv_scale, DECOUPLED * decoupled | MAXIMIZE * maximize,
    )  # fmt: skip


_ADAGRAD = (PARAMS, GRADS, state("sums"), HALVES)


def _adagrad(
    params: Tensors, grads: Tensors, sums: Tensors, halves: Tensors, lr_at: Tensor | None, grad_scale: Tensor | None,
    grad_factor: Tensor | None, found_inf: Tensor | None, lr: float, eps: float, weight_decay: float,
    inv_scale: float, flags: int,
) -> None:  # fmt: skip
    table = tables.table("adagrad", _ADAGRAD, (params, grads, sums, halves or None))
    args = started("adagrad", AdagradArgs, table, found_inf, inv_scale, grad_scale, grad_factor, lr_at, lr)
    args.eps, args.weight_decay, args.flags = eps, weight_decay, flags
    launch("adagrad", args, table.device, (params, halves))


_adagrad_operator = define(
    "adagrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, Tensor(c!)[] halves, Tensor? lr_at, "
    "Tensor? grad_scale, Tensor? grad_factor, Tensor? found_inf, float lr, float eps, float weight_decay, "
    "float inv_scale, int flags) -> ()",
    _adagrad,
)
