"""Steps of torch's optimizers by one kernel, which reads gradients as they are and writes masters, states and halves.

The state is the optimizer's own, in torch's layout. What a parameter's first step makes of it torch makes: a parameter
whose state is not there yet is left to torch, and so is whatever the kernels do not take. A training may go on with or
without kernels at any step.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoamp import kernels
from autoamp.scaling import Factor, kernel_factor
from autoamp.stepping.half_gradients import LeftHalf, raw_grad
from autoamp.tensors import without_grad

__all__ = ["step_by_kernels"]

_PLAIN = frozenset((Tensor, torch.nn.Parameter, LeftHalf))

_NONES = itertools.repeat(None)


class _Rows(NamedTuple):
    """Parameters with gradients, as parallel lists: with their gradients, their halves or None, and their states."""

    params: list[Tensor]
    grads: list[Tensor]
    halves: list[Tensor] | None
    states: list[dict[str, Any]]

    def some(self, chosen: Sequence[Any]) -> _Rows:
        """Return those rows for which ``chosen`` is true."""
        some: Any = [column and list(itertools.compress(column, chosen)) for column in self]
        return _Rows(*some)


# Parameters, their gradients, what all kernels take, and the columns of their states, in the order of `_Known.entries`.
_Step = Callable[[Any, dict[str, Any], list[Tensor], list[Tensor], dict[str, Any], list[list[Tensor]]], bool]


class _Known(NamedTuple):
    """How a kernel steps an optimizer of torch: the entries of a state that it takes, and the call.

    Of a group with options that no kernel has the entries are None.
    """

    entries: Callable[[dict[str, Any]], tuple[str, ...] | None]
    step: _Step


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
    found_inf = getattr(optimizer, "found_inf", None)
    for group in optimizer.param_groups:
        names = known.entries(group)
        for params, own in _parts(group["params"], halves):
            rows = _rows(optimizer, params, own)
            # As a rule they are all of one kind, and taken at once. If they are not, nothing has happened yet.
            if not rows.params or _take(known, group, names, rows, found_inf, factor):
                stepped += rows.params
                continue
            kinds = _kinds(rows, names)
            for kind in kinds:
                if len(kinds) > 1 and _take(known, group, names, kind, found_inf, factor):
                    stepped += kind.params
                else:
                    left = True
    return stepped, left


def _parts(
    params: list[Tensor], halves: Mapping[int, Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor] | None]]:  # fmt: skip
    """Yield a group's masters with their halves, and its other parameters."""
    own: list[Any] = list(map(halves.get, map(id, params)))
    if all(map(operator.is_not, own, _NONES)):
        yield params, own
        return
    chosen = [half is not None for half in own]
    yield list(itertools.compress(params, chosen)), list(itertools.compress(own, chosen))
    yield [param for param, half in zip(params, own, strict=True) if half is None], None


def _rows(optimizer: Any, params: list[Tensor], own: list[Tensor] | None) -> _Rows:
    """Return those of some parameters that have gradients."""
    holders = params
    if own is not None and LeftHalf in (types := set(map(type, params))):
        holders = own
        if len(types) > 1:
            pairs = zip(params, own, strict=True)
            holders = [half if type(param) is LeftHalf else param for param, half in pairs]
    grads: list[Any] = list(map(raw_grad, holders))
    states = list(map(optimizer.state.get, params, itertools.repeat({})))
    rows = _Rows(params, grads, own, states)
    if all(map(operator.is_not, grads, _NONES)):
        return rows
    return rows.some([grad is not None for grad in grads])


def _kinds(rows: _Rows, names: Sequence[str] | None) -> list[_Rows]:
    """Sort parameters by what a kernel takes at once, and by whether their states are there."""
    kinds: dict[Any, list[bool]] = {}
    for index, (param, grad, state) in enumerate(zip(rows.params, rows.grads, rows.states, strict=True)):
        narrow = None if rows.halves is None else rows.halves[index].dtype
        is_ready = names is not None and all(state.get(name) is not None for name in names)
        kind = type(param), param.device, param.dtype, grad.dtype, narrow, is_ready
        kinds.setdefault(kind, [False] * len(rows.params))[index] = True
    return [rows.some(chosen) for chosen in kinds.values()]


def _take(
    known: _Known, group: dict[str, Any], names: Sequence[str] | None, rows: _Rows, found_inf: Tensor | None,
    factor: Factor | None,
) -> bool:  # fmt: skip
    """Step parameters if a kernel takes them; tells whether. If not, nothing was written."""
    params, grads, halves, states = rows
    first, types = params[0], set(map(type, params))
    # To ask a device for its type takes longer.
    device_type = "cpu" if first.is_cpu else first.device.type
    package = kernels.opened(device_type)
    if package is None or names is None or len(types) > 1 or not types <= _PLAIN:
        return False
    # With halves the kernels themselves want fp32.
    if not _is_plain(group, first, device_type, found_inf) or (halves is None and not all(map(_is_fp32, params))):
        return False
    try:
        columns = [list(map(operator.itemgetter(name), states)) for name in names]
    except KeyError:
        return False
    how = {"halves": halves, "found_inf": found_inf}
    if factor is not None and LeftHalf in types:
        how |= kernel_factor(factor, first.device)
    return known.step(package, group, params, grads, how, columns)


def _is_fp32(param: Tensor) -> bool:
    return param.dtype is torch.float32


def _is_plain(group: dict[str, Any], param: Tensor, device_type: str, found_inf: Tensor | None) -> bool:
    """Tell whether a group asks for nothing of torch's, for parameters like this one, that a kernel does not do."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device != param.device and lr.device.type != "cpu":
        return False
    if device_type == "cuda" and not group.get("capturable") and torch.cuda.is_current_stream_capturing():
        # torch refuses this.
        return False
    return not group.get("differentiable") and (found_inf is None or bool(group.get("fused")))


def _rate(group: dict[str, Any], param: Tensor) -> Any:
    lr = group["lr"]
    return lr if isinstance(lr, Tensor) and lr.device == param.device and lr.dtype is torch.float32 else float(lr)


def _adam_entries(group: dict[str, Any]) -> tuple[str, ...]:
    return ("step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))


def _adam(
    package: Any, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], how: dict[str, Any],
    columns: list[list[Tensor]],
) -> bool:  # fmt: skip
    """`torch.optim.Adam` and `torch.optim.AdamW`."""
    steps, exp_avgs, exp_avg_sqs, *largest = columns
    beta1, beta2 = group["betas"]
    # Counts on a CPU beside parameters elsewhere the kernel would refuse, after a look at all of them.
    if steps[0].is_cpu is not params[0].is_cpu or isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        return False
    return kernels.attempt(
        package.adam_, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs=largest[0] if largest else None,
        step=steps, advance=True, lr=_rate(group, params[0]), beta1=beta1, beta2=beta2, eps=group["eps"],
        weight_decay=group["weight_decay"], decoupled=bool(group["decoupled_weight_decay"]),
        maximize=group["maximize"], **how,
    )  # fmt: skip


def _sgd_entries(group: dict[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _sgd(
    package: Any, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], how: dict[str, Any],
    columns: list[list[Tensor]],
) -> bool:  # fmt: skip
    """`torch.optim.SGD`."""
    if columns and not all(map(operator.is_not, columns[0], _NONES)):
        # A buffer that the first step is to make.
        return False
    return kernels.attempt(
        package.sgd_, params, grads, *columns, lr=_rate(group, params[0]), momentum=group["momentum"],
        dampening=group["dampening"], weight_decay=group["weight_decay"], nesterov=group["nesterov"],
        maximize=group["maximize"], **how,
    )  # fmt: skip


def _adagrad_entries(group: dict[str, Any]) -> tuple[str, ...] | None:
    return None if group["lr_decay"] else ("sum", "step")


def _adagrad(
    package: Any, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], how: dict[str, Any],
    columns: list[list[Tensor]],
) -> bool:  # fmt: skip
    """`torch.optim.Adagrad` with a learning rate that does not decay."""
    if how["found_inf"] is not None:
        # A skipped step would be counted.
        return False
    sums, steps = columns
    taken = kernels.attempt(
        package.adagrad_, params, grads, sums, lr=_rate(group, params[0]), eps=group["eps"],
        weight_decay=group["weight_decay"], maximize=group["maximize"], **how,
    )  # fmt: skip
    if taken:
        torch._foreach_add_(steps, 1)
    return taken


_KNOWN: dict[type[Any], _Known] = {
    torch.optim.Adam: _Known(_adam_entries, _adam),
    torch.optim.AdamW: _Known(_adam_entries, _adam),
    torch.optim.SGD: _Known(_sgd_entries, _sgd),
    torch.optim.Adagrad: _Known(_adagrad_entries, _adagrad),
}
