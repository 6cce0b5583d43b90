"""What half precision loses in a sampled step: updates, sums of gradients, loaded optimizer state, counts in buffers.

At most 2,047 elements of each tensor are looked at, as fp32 copies. Of a DTensor they are from the part of this rank.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from autoamp.scaling import is_sharded, local_of
from autoamp.stepping import living_optimizers_and_modules, stepped_params
from autoamp.tensors import HALF_DTYPES
from autoamp.torch_private import undisturbed

SavedState = Sequence[tuple[Tensor, str, Tensor]]
"""A parameter, the name of a state of it, and a few elements of that."""

BufferValues = weakref.WeakKeyDictionary[Module, dict[str, list[tuple[int, float]]]]
"""The largest value of each half buffer of a module, by the number of the step."""

_FEW = 1024
_VECTORS = 4
_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer has the step of one of torch's that step each element by itself.

    A few elements step then as they do among all.
    """
    step = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, cls) and step is inspect.unwrap(cls.step) for cls in _ELEMENTWISE)


def half_params(optimizer: Any) -> list[Tensor]:
    """Return the half parameters that an optimizer steps itself, without those of which this rank has no element."""
    return list(filter(_is_half, stepped_params(optimizer)))


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in HALF_DTYPES and local_of(tensor).numel() > 0


def _few(tensor: Tensor) -> Tensor:
    """Return elements at even distances, as an fp32 copy with one dimension."""
    flat = local_of(tensor.detach()).reshape(-1)
    # An odd distance, which does not stay in one column of a matrix.
    return flat[:: max(1, flat.numel() // _FEW) | 1].to(torch.float32, copy=True)


def _few_of_grad(param: Tensor) -> Tensor | None:
    return None if param.grad is None or param.grad.layout is not torch.strided else _few(param.grad)


@dataclass(frozen=True)
class GroupUpdates:
    """What a step of one parameter group did to half parameters whose gradients are not 0.

    Attributes:
        group: The index of the group.
        unmoved: The share of the elements with a gradient whose bits did not change.
        unmoved_in_fp32: The share that a step in fp32 would not have changed; None if the optimizer is not torch's.
        lost: The parameters of which fp32 would have moved more than half of the elements that did not move. If the
            optimizer is not torch's, all parameters of a group of which no element moved.
        since: The step before which the elements had the same bits.
    """

    group: int
    unmoved: float
    unmoved_in_fp32: float | None
    lost: Sequence[Tensor]
    since: int


@dataclass
class _Elements:
    """A few elements of a parameter before a step."""

    param: Tensor
    group: int
    values: Tensor
    grad: Any
    state: dict[str, Any]


class UpdateSample:
    """A few elements of each half parameter, from before a step until `compare` after it.

    Args:
        optimizer: Is about to step.
        step: The number of the step, from 1.
        closure: Whether a closure makes the gradients within the step.
    """

    def __init__(self, optimizer: Any, step: int, *, closure: bool) -> None:
        self.step = step
        self._elements = [
            _Elements(param, number, _few(param), None if closure else _few_of_grad(param), _state(optimizer, param))
            for number, group in enumerate(optimizer.param_groups)
            for param in filter(_is_half, group["params"])
        ]

    def compare(self, optimizer: Any, earlier: UpdateSample | None) -> Iterator[GroupUpdates]:
        """Compare the parameters with what they were, after the step.

        Args:
            optimizer: Has stepped.
            earlier: The sample before this one, for optimizers that are not torch's.
        """
        if getattr(optimizer, "grad_scale", None) is not None or bool(getattr(optimizer, "found_inf", False)):
            # A fused optimizer unscales by itself, and skips by itself.
            return
        for one in self._elements:
            one.grad = _few_of_grad(one.param) if one.grad is None else one.grad
        with_grad = [one for one in self._elements if one.grad is not None and bool(one.grad.any())]
        for number, some in itertools.groupby(with_grad, lambda one: one.group):
            if is_elementwise(optimizer):
                yield self._beside_fp32(optimizer, number, list(some))
            elif earlier is not None:
                yield from self._beside_earlier(number, list(some), earlier)

    def _beside_fp32(self, optimizer: Any, number: int, elements: Sequence[_Elements]) -> GroupUpdates:
        counts, lost = [], []
        for one, wide in zip(elements, _stepped_in_fp32(optimizer, number, elements), strict=True):
            has_grad, stays, stays_in_fp32 = one.grad != 0, _few(one.param) == one.values, wide == one.values
            sets = (has_grad, has_grad & stays, has_grad & stays_in_fp32, has_grad & stays & ~stays_in_fp32)
            counts.append([int(each.sum()) for each in sets])
            if 2 * counts[-1][3] > counts[-1][0]:
                lost.append(one.param)
        total, unmoved, unmoved_in_fp32, _ = map(sum, zip(*counts, strict=True))
        return GroupUpdates(number, unmoved / total, unmoved_in_fp32 / total, lost, self.step)

    def _beside_earlier(
        self, number: int, elements: Sequence[_Elements], earlier: UpdateSample
    ) -> Iterator[GroupUpdates]:
        before = {id(one.param): one.values for one in earlier._elements if one.grad is not None}
        params = [one.param for one in elements]
        stays = all(id(param) in before and torch.equal(before[id(param)], _few(param)) for param in params)
        if stays and not any(map(_keeps_low_bits, elements)):
            yield GroupUpdates(number, 1.0, None, params, earlier.step)


def _state(optimizer: Any, param: Tensor) -> dict[str, Any]:
    """Return copies of a parameter's optimizer state, in fp32 and of the same few elements."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _few(value) if value.shape == param.shape else value.detach().float().cpu().clone()

    return {name: copied(value) for name, value in optimizer.state.get(param, {}).items()}


def _keeps_low_bits(one: _Elements) -> bool:
    """Whether the optimizer keeps what rounds away: in masters of its own, or as the compensation of Kahan's sums."""
    alike = [value for value in one.state.values() if isinstance(value, Tensor) and value.shape == one.values.shape]
    rounded = (value.to(one.param.dtype).float() for value in alike)
    return any("kahan" in name for name in one.state) or any(torch.equal(value, one.values) for value in rounded)


def _stepped_in_fp32(optimizer: Any, number: int, elements: Sequence[_Elements]) -> list[Tensor]:
    """Return the elements after a step in fp32, by the optimizer's own code. Nothing of the optimizer is written to."""
    cls, options = type(optimizer), dict(optimizer.param_groups[number])
    # Not by its constructor, which programs and other libraries hook into.
    twin: Any = object.__new__(cls)
    params = [Parameter(one.values.clone()) for one in elements]
    for param, one in zip(params, elements, strict=True):
        param.grad = one.grad
    options.update({name: value.item() for name, value in options.items() if isinstance(value, Tensor)})
    options.update(params=params, fused=None, foreach=None, capturable=False, differentiable=False)
    twin.defaults, twin.param_groups = optimizer.defaults, [options]
    twin.state = collections.defaultdict(dict)
    twin.state.update((param, one.state) for param, one in zip(params, elements, strict=True) if one.state)
    inspect.unwrap(cls.step)(twin)
    return [param.detach() for param in params]


class GradientSum:
    """What half precision loses as backward passes add to a parameter's ``.grad``, until `stop`.

    Attributes:
        param: The parameter.
        passes: How many passes added to it.
    """

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.passes = 0
        self._sum: Any = None
        self._last: Any = None
        self._error: Any = 0.0
        self._hooks = [param.register_hook(self._arrived), param.register_post_accumulate_grad_hook(self._added)]

    def stop(self) -> float:
        """Remove the hooks. Return the norm of what was lost, as a part of the norm of the sum in fp32."""
        for hook in self._hooks:
            hook.remove()
        return 0.0 if self.passes < 2 else float(self._error.norm() / (self._last - self._error).norm())

    def _arrived(self, grad: Tensor) -> None:
        """Called with the gradient of a pass, before it is added."""
        self._sum = None
        with contextlib.suppress(Exception), undisturbed():
            held = _few_of_grad(self.param)
            if held is None or not held.any():
                self._error, self.passes = 0.0, 1
            elif self.param.grad is not None and self.param.grad.dtype in HALF_DTYPES:
                self._sum = held.add_(_few(grad))

    def _added(self, param: Tensor) -> None:
        """Called after the gradient was added."""
        if len(param._backward_hooks or ()) > 1 or len(param._post_accumulate_grad_hooks or ()) > 1:
            # A hook of the program may have changed it.
            self._sum = None
        if self._sum is not None:
            with contextlib.suppress(Exception), undisturbed():
                self._last = _few_of_grad(param)
                self._error = self._error + (self._last - self._sum)
                self.passes += 1


def sums_of(optimizer: Any) -> list[GradientSum]:
    """Watch the sums of gradients of an optimizer's few smallest half parameters, which are vectors as a rule."""
    params = [one for one in half_params(optimizer) if one.requires_grad and one.is_leaf and not is_sharded(one)]
    return [GradientSum(param) for param in sorted(params, key=Tensor.numel)[:_VECTORS]]


def fp32_state(optimizer: Any, state_dict: Mapping[str, Any]) -> SavedState:
    """Return a few elements of each fp32 state of half parameters in a state dict that is about to be loaded."""
    saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return [
        (param, name, _few(value))
        for key, param in zip(saved, stepped_params(optimizer), strict=False)
        if _is_half(param)
        for name, value in state_dict["state"].get(key, {}).items()
        if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
    ]


def rounded_state(optimizer: Any, saved: SavedState) -> Iterator[tuple[Tensor, str, Tensor, Tensor]]:
    """Yield the states that are half after the load and have other values: parameter, name, and elements of both."""
    for param, name, before in saved:
        value = optimizer.state[param].get(name)
        if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
            after = _few(value).to(before.device)
            if after.shape == before.shape and not torch.equal(after, before):
                yield param, name, before, after


def stopped_buffers(values: BufferValues, step: int) -> Iterator[tuple[str, torch.dtype, float]]:
    """Yield the name, dtype and largest value of each half buffer that counted and is too large to count on.

    Its largest value grew by the same whole number in each step, now grows by less, and adding that number to it rounds
    away.

    Args:
        values: Those at earlier samples, to which these are added.
        step: The number of the step.
    """
    for module in living_optimizers_and_modules()[1]:
        # A module that is half built has no buffers.
        with contextlib.suppress(AttributeError):
            for name, buffer in module.named_buffers(recurse=False):
                if _is_half(buffer) and not buffer.is_meta:
                    known = values.setdefault(module, {}).setdefault(name, [])
                    known.append((step, float(_few(buffer).max())))
                    if len(known) > 2 and _has_stopped(known[-3:], buffer.dtype):
                        yield f"{type(module).__name__}.{name}", buffer.dtype, known[-1][1]


def _has_stopped(values: Sequence[tuple[int, float]], dtype: torch.dtype) -> bool:
    before, now = ((value - last) / (step - at) for (at, last), (step, value) in itertools.pairwise(values))
    last = values[-1][1]
    counts = before >= 1.0 and before.is_integer() and 0.0 <= now < before
    return counts and float(torch.tensor(last + before, dtype=dtype)) == last
