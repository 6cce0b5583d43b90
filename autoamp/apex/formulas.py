"""How each optimizer steps: its rule, and the formulas on lists of fp32 or fp64 tensors.

Names that end in ``_`` write in place. A `Rule` says what computes a step: a compiled kernel, or the formula. A formula
calls torch's fused operator where that computes the same, else torch's multi-tensor functions. `autoamp.optimizers`
step by rules, the functions of `amp_C` by formulas.

Each function names its source:

- Adam: Kingma and Ba 2015, arXiv:1412.6980
- AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101
- LAMB: You et al. 2020, arXiv:1904.00962
- NovoGrad: Ginsburg et al. 2019, arXiv:1905.11286
- Adagrad: Duchi, Hazan and Singer 2011, JMLR 12, p. 2121

Lists that a function takes are parallel: one entry for each parameter, of its shape unless something else is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp import kernels, torch_private
from autoamp.tensors import are_dense_fp32


@dataclass(frozen=True)
class Rule:
    """How an optimizer steps. All that computes a step takes parameters, gradients, the states and the same keywords.

    Attributes:
        formula: Computes it for fp32 or fp64 tensors, by torch's functions.
        states: The names of a parameter's states, as checkpoints have them.
        kernel: The name of the compiled kernel, for tensors of any floating dtype but fp64; None for none.
    """

    formula: Callable[..., None]
    states: tuple[str, ...]
    kernel: str | None = None

    def step_by_kernel(
        self, lists: Sequence[list[Tensor]], masters: Callable[[list[Tensor]], list[Tensor]] | None = None,
        **numbers: Any,
    ) -> tuple[list[Tensor], ...]:  # fmt: skip
        """Step by the kernel what it takes, and return the lists of what it does not.

        ``masters`` returns what is stepped in place of half parameters, which the kernel sets to the result.
        """
        left: list[list[Tensor]] = [[] for _ in lists]
        for kernel, some in kernels.by_kind(self.kernel, *lists):
            taken, halves = (some, {}) if masters is None else ((masters(some[0]), *some[1:]), {"halves": some[0]})
            if kernel is None or not kernels.attempt(kernel, *taken, **halves, **numbers):
                for whole, part in zip(left, some, strict=True):
                    whole.extend(part)
        return tuple(left)


def corrections(beta1: float, beta2: float, step: int, wanted: Any) -> tuple[float, float]:
    """Return ``1 - beta ** step`` for both averages (Adam, section 3); 1 where no correction is wanted."""
    return (1.0 - beta1**step, 1.0 - beta2**step) if wanted else (1.0, 1.0)


def average_(
    grads: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], beta1: float, weight: float, beta2: float
) -> None:
    """Set ``m = beta1 * m + weight * g`` and ``v = beta2 * v + (1 - beta2) * g * g``, the averages of Adam and LAMB.

    In the papers ``weight`` is ``1 - beta1``. Apex also has 1, which it calls no averaging of gradients.
    """
    torch._foreach_mul_(firsts, beta1)
    torch._foreach_add_(firsts, grads, alpha=weight)
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_addcmul_(seconds, grads, grads, 1.0 - beta2)


def adam_updates(
    firsts: list[Tensor], seconds: list[Tensor], biases: tuple[Any, Any], eps: Any, *, eps_inside_sqrt: bool = False
) -> list[Tensor]:
    """Return ``(m / biases[0]) / (sqrt(v / biases[1]) + eps)`` (Adam, algorithm 1), as new tensors.

    With ``eps_inside_sqrt`` the divisor is ``sqrt(v / biases[1] + eps)``, as in early Apex. The biases and ``eps`` are
    numbers, or tensors without dimensions.
    """
    roots = list(torch._foreach_div(seconds, biases[1]))
    if eps_inside_sqrt:
        torch._foreach_add_(roots, eps)
    torch._foreach_sqrt_(roots)
    if not eps_inside_sqrt:
        torch._foreach_add_(roots, eps)
    updates = list(torch._foreach_div(firsts, biases[0]))
    torch._foreach_div_(updates, roots)
    return updates


def _adam_(
    values: list[Tensor], grads: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], *, lr: float, beta1: float,
    beta2: float, eps: float, step: int, weight_decay: float, decoupled: bool, bias_correction: bool,
    eps_inside_sqrt: bool = False,
) -> None:  # fmt: skip
    """Step by Adam (algorithm 1), or with ``decoupled`` by AdamW (algorithm 2)."""
    if bias_correction and not eps_inside_sqrt and _fused_kernel_takes(values, grads, firsts, seconds):
        # One pass over memory in place of a dozen.
        count = torch.full((), float(step), dtype=torch.float32, device=values[0].device)
        fused = torch_private.fused_adamw_ if decoupled else torch_private.fused_adam_
        fused(
            values, grads, firsts, seconds, [], [count] * len(values), lr=lr, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, amsgrad=False, maximize=False,
        )  # fmt: skip
        return
    if weight_decay and not decoupled:
        grads = list(torch._foreach_add(grads, values, alpha=weight_decay))
    average_(grads, firsts, seconds, beta1, 1.0 - beta1, beta2)
    biases = corrections(beta1, beta2, step, bias_correction)
    updates = adam_updates(firsts, seconds, biases, eps, eps_inside_sqrt=eps_inside_sqrt)
    if weight_decay and decoupled:
        torch._foreach_add_(updates, values, alpha=weight_decay)
    torch._foreach_add_(values, updates, alpha=-lr)


def _sgd_(
    values: list[Tensor], grads: list[Tensor], velocities: list[Tensor] | None = None, *, lr: float, momentum: float,
    dampening: float, weight_decay: float, nesterov: bool, decay_after_momentum: bool, first: bool = False,
    inv_scale: float = 1.0,
) -> None:  # fmt: skip
    """Step by SGD with momentum (Sutskever et al. 2013, ICML 28, p. 1139), as `torch.optim.SGD` does.

    With ``first`` the gradients become the velocities. Without velocities there is no momentum.
    """
    if inv_scale != 1.0:
        grads = list(torch._foreach_mul(grads, inv_scale))
    differs = first or (decay_after_momentum and weight_decay)
    lists = (values, grads) if velocities is None else (values, grads, velocities)
    if not differs and _fused_kernel_takes(*lists):
        torch_private.fused_sgd_(
            values, grads, velocities or [], lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
            nesterov=nesterov, maximize=False, is_first_step=False,
        )  # fmt: skip
        return
    if weight_decay and not decay_after_momentum:
        grads = list(torch._foreach_add(grads, values, alpha=weight_decay))
    updates = grads
    if velocities is not None:
        if first:
            torch._foreach_copy_(velocities, grads)
        else:
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, grads, alpha=1.0 - dampening)
        updates = list(torch._foreach_add(grads, velocities, alpha=momentum)) if nesterov else velocities
    if weight_decay and decay_after_momentum:
        updates = list(torch._foreach_add(updates, values, alpha=weight_decay))
    torch._foreach_add_(values, updates, alpha=-lr)


def clipped(grads: list[Tensor], global_norm: Tensor, max_norm: float) -> list[Tensor]:
    """Return gradients whose norm together is ``global_norm``, scaled down to ``max_norm`` where that is above 0."""
    if max_norm <= 0:
        return grads
    # Not `max_norm / global_norm`, which for gradients that are all 0 is a division by 0.
    excess = torch.clamp(global_norm / max_norm, min=1.0)
    return list(torch._foreach_div(grads, [excess.to(grad) for grad in grads]))


def _lamb_(
    values: list[Tensor], grads: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], *, lr: float, beta1: float,
    beta2: float, eps: float, step: int, weight_decay: float, decoupled: bool, bias_correction: bool,
    grad_averaging: bool, always_adapt: bool, global_norm: Tensor, max_norm: float,
) -> None:  # fmt: skip
    """Step by LAMB (algorithm 2), after clipping by the global norm of all gradients where ``max_norm`` is above 0.

    The list ``grads`` then holds the clipped gradients, so that fp32 copies which only it held are freed.
    """
    grads[:] = clipped(grads, global_norm, max_norm)
    if weight_decay and not decoupled:
        grads = list(torch._foreach_add(grads, values, alpha=weight_decay))
    average_(grads, firsts, seconds, beta1, 1.0 - beta1 if grad_averaging else 1.0, beta2)
    updates = adam_updates(firsts, seconds, corrections(beta1, beta2, step, bias_correction), eps)
    if weight_decay and decoupled:
        torch._foreach_add_(updates, values, alpha=weight_decay)
    if weight_decay or always_adapt:
        trust_(updates, torch._foreach_norm(values), torch._foreach_norm(updates))
    torch._foreach_add_(values, updates, alpha=-lr)


def _fused_kernel_takes(*lists: list[Tensor]) -> bool:
    """Whether torch's fused operators take these: they go through memory, so that all must lie in one order."""
    tensors = [tensor for some in lists for tensor in some]
    if not tensors or tensors[0].device.type not in ("cpu", "cuda"):
        return False
    return are_dense_fp32(tensors, tensors[0].device) and all(map(Tensor.is_contiguous, tensors))


def adam_on_device_(
    values: list[Tensor], grads: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], *, lr: Tensor, beta1: float,
    beta2: float, eps: float, step: Tensor, bias_correction: Any, weight_decay: float, decoupled: bool,
    found_inf: Tensor, eps_inside_sqrt: bool = False,
) -> None:  # fmt: skip
    """Step by Adam (algorithm 1) or AdamW (algorithm 2), whose numbers are tensors on the parameters' device.

    So the host never waits for the device, and a CUDA graph can capture the step. ``lr``, ``step`` and ``found_inf``
    are tensors without dimensions.

    Args:
        values: The parameters, written in place.
        grads: Their gradients, which are not written to.
        firsts: The averages of the gradients, written in place.
        seconds: The averages of their squares, written in place.
        lr: The learning rate, fp32.
        beta1: The decay of ``firsts``.
        beta2: The decay of ``seconds``.
        eps: Added to the root of the second average.
        step: The number of this step, from 1, an integer.
        bias_correction: Whether the averages are divided by ``1 - beta ** step``.
        weight_decay: The weight decay.
        decoupled: Whether the decay is AdamW's. If not, it is added to the gradient.
        found_inf: Where it is not 0 nothing changes, whatever the gradients are.
        eps_inside_sqrt: Whether ``eps`` is added under the root.
    """

    skip = found_inf != 0

    def unless_skipped(neutral: float, value: Tensor | float) -> Tensor:
        return torch.where(skip, neutral, value)

    def bias(beta: float) -> Tensor:
        # 1 - beta ** step. That difference itself would lose digits in fp32.
        return unless_skipped(1.0, -torch.expm1(step.float() * (math.log(beta) if beta else -math.inf)))

    if weight_decay and not decoupled:
        grads = list(torch._foreach_add(grads, values, alpha=weight_decay))
    # A product with 0 would be nan where a gradient is inf or nan.
    grads = [grad.masked_fill(skip, 0.0) for grad in grads]
    torch._foreach_mul_(firsts, unless_skipped(1.0, beta1))
    torch._foreach_add_(firsts, torch._foreach_mul(grads, unless_skipped(0.0, 1.0 - beta1)))
    torch._foreach_mul_(seconds, unless_skipped(1.0, beta2))
    torch._foreach_add_(seconds, torch._foreach_mul(torch._foreach_mul(grads, grads), unless_skipped(0.0, 1.0 - beta2)))
    # A skipped step must not divide 0 by 0. An eps above 0 prevents that, and can stay a Python number: adding a tensor
    # to a list of tensors waits for the device.
    small = eps if isinstance(eps, float) and eps > 0.0 else unless_skipped(1.0, eps)
    biases = (bias(beta1), bias(beta2)) if bias_correction else (1.0, 1.0)
    updates = adam_updates(firsts, seconds, biases, small, eps_inside_sqrt=eps_inside_sqrt)
    if weight_decay and decoupled:
        torch._foreach_add_(updates, values, alpha=weight_decay)
    torch._foreach_mul_(updates, unless_skipped(0.0, -lr))
    torch._foreach_add_(values, updates)


def trust_(updates: list[Tensor], value_norms: Sequence[Tensor], update_norms: Sequence[Tensor]) -> None:
    """Multiply each update by its trust ratio ``|value| / |update|``, or by 1 where either norm is 0.

    LAMB, algorithm 2, whose function phi is the identity here. The norms are tensors without dimensions.
    """
    ratios = []
    for update, value_norm, update_norm in zip(updates, value_norms, update_norms, strict=True):
        both = (value_norm != 0) & (update_norm != 0)
        ratios.append(torch.where(both, value_norm / update_norm, 1.0).to(update))
    torch._foreach_mul_(updates, ratios)


def _adagrad_(
    values: list[Tensor], grads: list[Tensor], sums: list[Tensor], *, lr: float, eps: float, weight_decay: float,
    decoupled: bool,
) -> None:  # fmt: skip
    """Set ``s += g * g`` and ``w -= lr * g / (sqrt(s) + eps)`` (Adagrad, figure 1, diagonal matrices).

    The decay is no part of the paper: it is decoupled, as AdamW's, or added to the gradient.
    """
    if weight_decay and not decoupled:
        grads = list(torch._foreach_add(grads, values, alpha=weight_decay))
    torch._foreach_addcmul_(sums, grads, grads, 1.0)
    roots = torch._foreach_sqrt(sums)
    torch._foreach_add_(roots, eps)
    updates = list(torch._foreach_div(grads, roots))
    if weight_decay and decoupled:
        torch._foreach_add_(updates, values, alpha=weight_decay)
    torch._foreach_add_(values, updates, alpha=-lr)


def _novograd_(
    values: list[Tensor], grads: list[Tensor], firsts: list[Tensor], norms: list[Tensor], *, lr: float, beta1: float,
    beta2: float, eps: float, step: int, weight_decay: float, bias_correction: bool, grad_averaging: bool, inside: bool,
) -> None:  # fmt: skip
    """Step by NovoGrad: with ``inside`` and without bias corrections this is algorithm 1 of the paper.

    Args:
        values: The parameters, written in place.
        grads: Their gradients, which are not written to.
        firsts: The averages of the gradients, written in place.
        norms: The averaged norm of each gradient, without dimensions.
        lr: The learning rate.
        beta1: The decay of the averages.
        beta2: The decay of the averaged norms.
        eps: Added to the norms.
        step: The number of this step, from 1.
        weight_decay: The weight decay.
        bias_correction: Whether the averages are divided by ``1 - beta1 ** step``, the norms by the root of that of
            ``beta2``.
        grad_averaging: Whether a gradient enters its average with ``1 - beta1``, or with 1 as in the paper.
        inside: Whether gradients are normalised, and the decay added to them, before they enter the average. If not,
            the average is normalised, and the decay added to that.
    """
    biases = corrections(beta1, beta2, step, bias_correction)
    scales = [(norm / biases[1] ** 0.5 + eps).to(grad) for norm, grad in zip(norms, grads, strict=True)]
    if inside:
        grads = list(torch._foreach_div(grads, scales))
        torch._foreach_add_(grads, values, alpha=weight_decay)
    torch._foreach_mul_(firsts, beta1)
    torch._foreach_add_(firsts, grads, alpha=1.0 - beta1 if grad_averaging else 1.0)
    updates = list(torch._foreach_div(firsts, biases[0]))
    if not inside:
        torch._foreach_div_(updates, scales)
        torch._foreach_add_(updates, values, alpha=weight_decay)
    torch._foreach_add_(values, updates, alpha=-lr)


def write_back(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write new values into tensors of any dtypes. A value that is the tensor itself was stepped in place."""
    pairs = [(param, value) for param, value in zip(params, values, strict=True) if param is not value]
    if pairs:
        torch._foreach_copy_([param for param, _ in pairs], [value for _, value in pairs])


ADAM = Rule(_adam_, ("exp_avg", "exp_avg_sq"), "adam_")
ADAM_ON_DEVICE = Rule(adam_on_device_, ("exp_avg", "exp_avg_sq"), "adam_")
SGD = Rule(_sgd_, ("momentum_buffer",), "sgd_")
LAMB = Rule(_lamb_, ("exp_avg", "exp_avg_sq"), "lamb_")
ADAGRAD = Rule(_adagrad_, ("sum",))
# The fourth list is that of the averaged norms, which are blended before the step.
NOVOGRAD = Rule(_novograd_, ("exp_avg",))
