"""Optimizer steps whose size depends on norms of whole tensors: LAMB and NovoGrad. They take two passes.

What `optimizers` says of lists of tensors holds here too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoamp_kernels.abi import (
    DECOUPLED,
    FIRST,
    INSIDE,
    MAX_NORM,
    MAXIMIZE,
    NO_BIAS_CORRECTION,
    TRUST,
    LambArgs,
    NovogradArgs,
)
from autoamp_kernels.calls import address, by_operator, launch, space, sums, tables
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

__all__ = ["lamb_", "novograd_"]

_FIRSTS, _SECONDS, _NORMS = state("exp_avgs"), state("exp_avg_sqs"), state("norms", single=True)


def lamb_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *, lr: float | Tensor, beta1: float,
    beta2: float, eps: float, weight_decay: float = 0.0, step: float | Tensor | Tensors, halves: Tensors | None = None,
    decoupled: bool = True, maximize: bool = False, bias_correction: bool = True, grad_averaging: bool = True,
    always_adapt: bool = False, global_norm: Tensor | None = None, max_norm: float = 0.0, advance: bool = False,
    inv_scale: float = 1.0, grad_scale: Tensor | None = None, grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Step by LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2, where phi is the identity).

    What is not named here is as in `adam_`. A trust ratio is ``|parameter| / |update|``, or 1 where either is 0.
    Without trust ratios one pass does all of it.

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
        step: The number of this step, from 1, as in `adam_`.
        halves: fp16 or bf16 tensors that are set to the new parameters; None for none.
        decoupled: Whether the decay is added to the update, as in the paper. If not, it is added to the gradient.
        maximize: Whether the sign of the gradients is turned.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        grad_averaging: Whether the weight of a gradient in its average is ``1 - beta1``. If not, it is 1.
        always_adapt: Whether there are trust ratios without a weight decay too.
        global_norm: One fp32 element, the 2-norm of all gradients times the factors; None for no clipping.
        max_norm: Gradients are divided by ``global_norm / max_norm`` where that is above 1; 0 for no clipping.
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
    flags |= TRUST * bool(weight_decay or always_adapt)
    lists = (params, grads, exp_avgs, exp_avg_sqs, halves or [], steps)
    run = _lamb_operator if by_operator((params, grads, halves)) else _lamb
    run(
        *lists, step_at, lr_at, grad_scale, grad_factor, found_inf, global_norm, rate,
        beta1, beta2, 1.0 - beta1 if grad_averaging else 1.0, eps, weight_decay, max_norm, number, inv_scale, flags,
        advance,
    )  # fmt: skip


_LAMB = (PARAMS, GRADS, _FIRSTS, _SECONDS, HALVES, STEPS)


def _lamb(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, halves: Tensors, steps: Tensors,
    step_at: Tensor | None, lr_at: Tensor | None, grad_scale: Tensor | None, grad_factor: Tensor | None,
    found_inf: Tensor | None, global_norm: Tensor | None, lr: float, beta1: float, beta2: float, weight: float,
    eps: float, weight_decay: float, max_norm: float, step: float, inv_scale: float, flags: int, advance: bool,
) -> None:  # fmt: skip
    table = tables.table("lamb", _LAMB, (params, grads, exp_avgs, exp_avg_sqs, halves or None, steps or None))
    args = started("lamb", LambArgs, table, found_inf, inv_scale, grad_scale, grad_factor, lr_at, lr)
    fill_step("lamb", args, table, step, step_at, advance)
    args.global_norm = address("lamb", "global_norm", global_norm, table, torch.float32)
    args.beta1, args.beta2, args.weight = beta1, beta2, weight
    args.eps, args.weight_decay, args.max_norm, args.flags = eps, weight_decay, max_norm, flags
    if flags & TRUST:
        partial = sums(table, 2)
        ratios = space(table, len(table.counts), torch.float32)
        args.partial, args.ratios = partial.data_ptr(), ratios.data_ptr()
    launch("lamb", args, table.device, (params, halves))


_lamb_operator = define(
    "lamb_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(e!)[] halves, Tensor(f!)[] steps, Tensor(g!)? step_at, Tensor? lr_at, Tensor? grad_scale, "
    "Tensor? grad_factor, Tensor? found_inf, Tensor? global_norm, float lr, float beta1, float beta2, float weight, "
    "float eps, float weight_decay, float max_norm, float step, float inv_scale, int flags, bool advance) -> ()",
    _lamb,
)


def novograd_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, norms: Tensors, *, lr: float | Tensor, beta1: float,
    beta2: float, eps: float, weight_decay: float = 0.0, step: float | Tensor | Tensors = 1.0,
    halves: Tensors | None = None, first: bool = False, inside: bool = False, max_norms: bool = False,
    maximize: bool = False, bias_correction: bool = False, grad_averaging: bool = False, advance: bool = False,
    inv_scale: float = 1.0, grad_scale: Tensor | None = None, grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Step by NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286): with ``inside`` this is algorithm 1.

    What is not named here is as in `adam_`.

    Args:
        params: Parameters, fp32, or half ones without ``halves``; computed in fp32.
        grads: Their gradients: fp32, fp16 or bf16. They are not written to.
        exp_avgs: The averages of the gradients, fp32.
        norms: The averaged norm of each gradient: a list of fp32 tensors of one element.
        lr: The learning rate: a number, or one fp32 element on the parameters' device.
        beta1: The decay of ``exp_avgs``.
        beta2: The decay of ``norms``; of 2-norms the squares are averaged.
        eps: Added to the averaged norm.
        weight_decay: The factor of the parameter in the decay.
        step: The number of this step, from 1, as in `adam_`; of no effect without a bias correction.
        halves: fp16 or bf16 tensors that are set to the new parameters; None for none.
        first: Whether ``norms`` hold nothing yet. They are set to the gradients' norms then.
        inside: Whether gradients are normalised, and the decay added to them, before they enter the average. If not,
            the average is normalised, and the decay added to that.
        max_norms: Whether norms are the largest absolute values. If not, they are 2-norms.
        maximize: Whether the sign of the gradients is turned.
        bias_correction: Whether the gradient's average is divided by ``1 - beta1 ** step``, and the norm's by the root
            of ``1 - beta2 ** step``.
        grad_averaging: Whether the weight of a gradient in its average is ``1 - beta1``. If not, it is 1, as in the
            paper.
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
    flags = MAXIMIZE * maximize | NO_BIAS_CORRECTION * (not bias_correction) | FIRST * first | INSIDE * inside
    flags |= MAX_NORM * max_norms
    lists = (params, grads, exp_avgs, halves or [], list(norms), steps)
    run = _novograd_operator if by_operator((params, grads, halves)) else _novograd
    run(
        *lists, step_at, lr_at, grad_scale, grad_factor, found_inf, rate, beta1, beta2,
        1.0 - beta1 if grad_averaging else 1.0, eps, weight_decay, number, inv_scale, flags, advance,
    )  # fmt: skip


_NOVOGRAD = (PARAMS, GRADS, _FIRSTS, HALVES, _NORMS, STEPS)


def _novograd(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, halves: Tensors, norms: Tensors, steps: Tensors,
    step_at: Tensor | None, lr_at: Tensor | None, grad_scale: Tensor | None, grad_factor: Tensor | None,
    found_inf: Tensor | None, lr: float, beta1: float, beta2: float, weight: float, eps: float, weight_decay: float,
    step: float, inv_scale: float, flags: int, advance: bool,
) -> None:  # fmt: skip
    table = tables.table("novograd", _NOVOGRAD, (params, grads, exp_avgs, halves or None, norms, steps or None))
    args = started("novograd", NovogradArgs, table, found_inf, inv_scale, grad_scale, grad_factor, lr_at, lr)
    fill_step("novograd", args, table, step, step_at, advance)
    args.beta1, args.beta2, args.weight = beta1, beta2, weight
    args.eps, args.weight_decay, args.flags = eps, weight_decay, flags
    partial = sums(table)
    args.partial = partial.data_ptr()
    launch("novograd", args, table.device, (params, halves))


_novograd_operator = define(
    "novograd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] halves, Tensor(d!)[] norms, "
    "Tensor(e!)[] steps, Tensor(g!)? step_at, Tensor? lr_at, Tensor? grad_scale, Tensor? grad_factor, "
    "Tensor? found_inf, float lr, float beta1, float beta2, float weight, float eps, float weight_decay, float step, "
    "float inv_scale, int flags, bool advance) -> ()",
    _novograd,
)
