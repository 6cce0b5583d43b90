"""Losses of half precision that make no inf: swallowed updates, rounded optimizer state, gradients summed in half.

They are looked for in steps 1, 4, 16, 64 and so on of each optimizer of torch's class. Other steps cost two calls in
Python. No result changes, and each kind of loss is told once. At most 2,047 elements of each tensor are looked at, as
fp32 copies. Of a DTensor they are from the part of this rank.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from autoamp.core import is_sharded, listen, local_of, named_params, stepped_params
from autoamp.errors import warn_user
from autoamp.tensors import HALF_DTYPES, dtype_name, is_capturing
from autoamp.tools.tables import first_of
from autoamp.torch_private import has_step_pre_hooks, undisturbed

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Tensors of at most so many elements are looked at whole.
_FEW = 1024
# A sum of 16 gradients in bf16 is off by 0.2 % as a rule, and by 6 % where the later ones are swallowed.
_LOST_OF_SUM = 0.01
# Below this part of its highest learning rate an optimizer has all but ended.
_LOW_LR = 0.1
# The sums of so many gradients are looked at.
_SUMS = 4
# Their steps are those of each element by itself, so that a few elements step as they do among all.
_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip
_MASTERS = 'Keep fp32 master weights (opt_level="O2" or FP16_Optimizer)'
_REMEDIES = {
    "updates": f"{_MASTERS}, or use an optimizer with stochastic rounding (torchao.optim, bf16_stochastic_round=True) "
    "or Kahan summation (optimi, kahan_sum=True)",
    "optimizer state": f"{_MASTERS}, whose state stays fp32, or copy the fp32 tensors into optimizer.state afterwards",
    "gradient sums": 'Use opt_level="O2", which sums the gradients of a step in fp32',
}


@dataclass
class _Elements:
    """A few elements of a half parameter before a step, in fp32, with those of its gradient and of its state."""

    param: Tensor
    group: int
    values: Tensor
    grad: Any
    state: dict[str, Any]


class _GradientSum:
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


@dataclass
class _Steps:
    """The steps of one optimizer.

    Attributes:
        count: How many began.
        running: The frame that calls the running one. A class's own step may call that of its base.
        sample: Of the half parameters, if the step that runs is sampled.
        earlier: The sample before it, and the number of its step.
        sums: Those of the coming step, if that is to be sampled.
        saved: The parameter, the name and a few elements of each state that was loaded, until it is compared.
        rates: The highest and the last learning rate of each group, as far as they were sampled.
    """

    count: int = 0
    running: FrameType | None = None
    sample: Sequence[_Elements] | None = None
    earlier: tuple[int, Sequence[_Elements]] | None = None
    sums: Sequence[_GradientSum] = ()
    saved: Sequence[tuple[Tensor, str, Tensor]] = ()
    rates: dict[int, tuple[float, float]] = field(default_factory=dict)


class HalfLosses:
    """Looks for losses of half precision from `start` to `stop`, in all optimizers of torch's class in the process.

    Attributes:
        active: Whether it looks.
        rows: What was found as plain values, the last of each kind, optimizer and group. ``kind`` is ``"updates"``,
            ``"optimizer state"`` or ``"gradient sums"``. ``step`` is the number of the optimizer's step, from 1, and
            ``optimizer`` its class. ``group`` is the index of the group, of updates alone. ``sentence`` says what was
            lost, and ``remedy`` what to do.
        lost: The ids of the half parameters that lost updates.
        seen: The ids of all half parameters that were looked at.
    """

    def __init__(self) -> None:
        self.active = False
        self._listening = contextlib.ExitStack()
        self._steps: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self.reset()

    def reset(self) -> None:
        """Forget what was found."""
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.lost: set[int] = set()
        self.seen: set[int] = set()

    def start(self) -> None:
        """Look at each sampled step from now on."""
        self._listening = listen(
            optimizer_called=self._before_step,
            optimizer_returned=self._after_step,
            around_load_optimizer=self._around_load,
        )
        self.active = True

    def stop(self) -> None:
        """Look no more. Does nothing the second time."""
        self.active = False
        self._listening.close()
        for steps in self._steps.values():
            for one in steps.sums:
                one.stop()
        self._steps.clear()

    # -- steps and loads --

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        steps = self._steps.setdefault(optimizer, _Steps())
        caller, running = sys._getframe(1), steps.running
        if running is not None and any(frame is running for frame, _ in traceback.walk_stack(caller)):
            return
        # A step that raised has no end.
        steps.running, steps.sample = caller, None
        steps.count += 1
        if steps.saved:
            self._tell("optimizer state", optimizer, steps, _lost_state)
        if is_sampled(steps.count):
            self._tell("gradient sums", optimizer, steps, _lost_sums)
            # A closure makes the gradients, and the program's own hooks may change them, after this.
            comes_later = any(map(callable, (*args[1:], *kwargs.values()))) or has_step_pre_hooks(optimizer)
            steps.sample = found_by(_sample_of, optimizer, not comes_later)
            self.seen.update(id(one.param) for one in steps.sample)

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        steps = self._steps.get(optimizer)
        if steps is None or steps.running is not sys._getframe(1):
            return
        steps.running = None
        if steps.sample is not None:
            self._tell("updates", optimizer, steps, self._lost_updates)
        if is_sampled(steps.count + 1) and not steps.sums:
            steps.sums = found_by(_sums_of, optimizer)

    def _around_load(self, original: Callable[..., None]) -> Callable[..., None]:
        def load_state_dict(optimizer: Any, state_dict: Any) -> None:
            saved = found_by(_fp32_state, optimizer, state_dict)
            original(optimizer, state_dict)
            steps = self._steps.setdefault(optimizer, _Steps())
            steps.saved = saved
            # What overrides this method may put the state back by itself: then the next step tells.
            if type(optimizer).load_state_dict is Optimizer.load_state_dict:
                self._tell("optimizer state", optimizer, steps, _lost_state)

        return load_state_dict

    def _lost_updates(self, optimizer: Any, steps: _Steps) -> Iterator[tuple[int, str]]:
        """Yield the groups that lost updates in a sampled step, after it."""
        sample, earlier = steps.sample or (), steps.earlier
        step = inspect.unwrap(type(optimizer).step)
        in_fp32 = any(isinstance(optimizer, cls) and step is inspect.unwrap(cls.step) for cls in _ELEMENTWISE)
        steps.sample = None
        # An optimizer may step at each so many calls alone, and the first samples are close together.
        steps.earlier = (steps.count, sample) if steps.count > 1 and not in_fp32 else None
        steady = {number for number, group in enumerate(optimizer.param_groups) if _is_steady(steps, number, group)}
        if getattr(optimizer, "grad_scale", None) is not None or bool(getattr(optimizer, "found_inf", False)):
            # A fused optimizer unscales by itself, and skips by itself.
            return
        for one in sample:
            one.grad = _few_of_grad(one.param) if one.grad is None else one.grad
        with_grad = [one for one in sample if one.grad is not None and bool(one.grad.any())]
        name = f"step {steps.count} of {type(optimizer).__name__}"
        for number, some in itertools.groupby(with_grad, lambda one: one.group):
            lost: list[Tensor] = []
            elements, found = list(some), ""
            if in_fp32:
                lost, share = _lost_beside_fp32(optimizer, number, elements)
                found = f"{name} changed no bit of {share}"
            elif earlier is not None and _are_unmoved(elements, earlier[1]):
                lost = [one.param for one in elements]
                found = f"no bit changed in group {number} from step {earlier[0]} to {name}, though it has gradients"
            if lost and number in steady:
                self.lost.update(map(id, lost))
                dtype, least = lost[0].dtype, f"1/{4 / torch.finfo(lost[0].dtype).eps:g}"
                swallows = f"in {dtype_name(dtype)} an update below {least} of a weight rounds away"
                yield number, f"{found}: {swallows}, as in {_names(optimizer, lost)}"

    def _tell(self, kind: str, optimizer: Any, steps: _Steps, look: Callable[..., Iterable[Any]]) -> None:
        """Keep what a look finds, a group and a sentence each, and warn of the first of each kind."""
        for group, sentence in found_by(look, optimizer, steps):
            is_known = any(known["kind"] == kind for known in self.rows.values())
            self.rows[kind, id(steps), group] = {
                "kind": kind, "step": steps.count, "optimizer": type(optimizer).__name__, "group": group,
                "sentence": sentence, "remedy": _REMEDIES[kind],
            }  # fmt: skip
            if not is_known:
                warn_user(f"{sentence}. {_REMEDIES[kind]}")


def found_by(look: Callable[..., Iterable[_T]], *args: Any) -> list[_T]:
    """Return what a look finds. Nothing intercepts what it does, and no exception of it ends the program."""
    found: list[_T] = []
    if torch.compiler.is_compiling() or is_capturing():
        return found
    try:
        with undisturbed():
            found.extend(look(*args))
    except Exception:
        log.debug("a step could not be looked at", exc_info=True)
    return found


def is_sampled(step: int) -> bool:
    """Whether the step of this number, from 1, is 1, 4, 16, 64 and so on."""
    return step.bit_count() == 1 and step.bit_length() % 2 == 1


def _is_steady(steps: _Steps, number: int, group: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a group is neither that of a warm-up nor close to 0, and take note of it."""
    rate = float(group.get("lr", 1.0))
    highest, last = steps.rates.get(number, (0.0, 0.0))
    steps.rates[number] = max(highest, rate), rate
    return 0.0 < _LOW_LR * highest <= rate <= last


def _names(optimizer: Any, params: Sequence[Tensor]) -> str:
    """Return the names of the first of some parameters, and how many others there are."""
    wanted = {id(param) for param in params}
    names = [name for name, param in named_params(optimizer) if id(param) in wanted]
    return first_of(names, 3)


# -- gradients that are summed, and state that is loaded --


def _sums_of(optimizer: Any) -> list[_GradientSum]:
    """Watch the sums of gradients of an optimizer's few smallest half parameters, which are vectors as a rule."""
    halves = filter(_is_half, stepped_params(optimizer))
    params = [one for one in halves if one.requires_grad and one.is_leaf and not is_sharded(one)]
    return [_GradientSum(param) for param in sorted(params, key=Tensor.numel)[:_SUMS]]


def _lost_sums(optimizer: Any, steps: _Steps) -> Iterator[tuple[None, str]]:
    """Yield what the sums lost before a sampled step, of the one that lost most."""
    sums, steps.sums = steps.sums, ()
    for lost, one in sorted(((one.stop(), one) for one in sums), key=lambda pair: -pair[0])[:1]:
        if lost > _LOST_OF_SUM:
            sentence = (
                f"{lost:.1%} of the gradient of {_names(optimizer, [one.param])} was lost as {one.passes} "
                f"backward passes added it up in {dtype_name(one.param.dtype)}, before step {steps.count}"
            )
            yield None, sentence


def _fp32_state(optimizer: Any, state_dict: Mapping[str, Any]) -> list[tuple[Tensor, str, Tensor]]:
    """Return a few elements of each fp32 state of half parameters in a state dict that is about to be loaded."""
    saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return [
        (param, name, _few(value))
        for key, param in zip(saved, stepped_params(optimizer), strict=False)
        if _is_half(param)
        for name, value in state_dict["state"].get(key, {}).items()
        if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
    ]


def _lost_state(optimizer: Any, steps: _Steps) -> Iterator[tuple[None, str]]:
    """Yield what a load lost of the state."""
    saved, steps.saved = steps.saved, ()
    rounded = []
    for param, name, before in saved:
        value = optimizer.state[param].get(name)
        if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
            after = _few(value).to(before.device)
            if after.shape == before.shape and not torch.equal(after, before):
                rounded.append((param, name, before, after))
    if rounded:
        params, names, *elements = zip(*rounded, strict=True)
        saved_values, values = (torch.cat([one.cpu() for one in some]) for some in elements)
        changes = ((values - saved_values) / saved_values).abs()[(saved_values != 0) & saved_values.isfinite()]
        gone = (changes == 1) | changes.isinf()
        sentence = (
            f"load_state_dict of {type(optimizer).__name__} rounded {', '.join(sorted(set(names)))} of "
            f"{_names(optimizer, params)} from float32 to {dtype_name(params[0].dtype)}: values changed by up to "
            f"{max(changes[~gone].tolist(), default=0.0):.2%}, and {float(gone.float().mean()):.1%} of them became "
            "0 or inf"
        )
        yield None, sentence


# -- a few elements, which fp32 steps as well --


def _is_half(tensor: Tensor) -> bool:
    """Whether a tensor is of a half dtype, and this rank has elements of it."""
    return tensor.dtype in HALF_DTYPES and local_of(tensor).numel() > 0


def _few(tensor: Tensor) -> Tensor:
    """Return elements at even distances, as an fp32 copy with one dimension."""
    flat = local_of(tensor.detach()).reshape(-1)
    # An odd distance, which does not stay in one column of a matrix.
    return flat[:: max(1, flat.numel() // _FEW) | 1].to(torch.float32, copy=True)


def _few_of_grad(param: Tensor) -> Tensor | None:
    """Return such elements of the gradient of a parameter; None without one."""
    return None if param.grad is None or param.grad.layout is not torch.strided else _few(param.grad)


def _sample_of(optimizer: Any, with_grads: bool) -> Iterator[_Elements]:
    """Yield a few elements of each half parameter before a step, ``with_grads`` if its gradient is there already."""

    def copied(value: Any, param: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _few(value) if value.shape == param.shape else value.detach().float().cpu().clone()

    for number, group in enumerate(optimizer.param_groups):
        for param in filter(_is_half, group["params"]):
            state = {name: copied(value, param) for name, value in optimizer.state.get(param, {}).items()}
            yield _Elements(param, number, _few(param), _few_of_grad(param) if with_grads else None, state)


def _are_unmoved(elements: Sequence[_Elements], earlier: Sequence[_Elements]) -> bool:
    """Whether no element of a group moved since an earlier sample, and nothing keeps what rounds away.

    An optimizer may keep that in masters of its own, or as the compensation of Kahan's sums.
    """
    before = {id(one.param): one.values for one in earlier if one.grad is not None}
    for one in elements:
        alike = [value for value in one.state.values() if isinstance(value, Tensor) and value.shape == one.values.shape]
        if any("kahan" in name for name in one.state) or any(
            torch.equal(value.to(one.param.dtype).float(), one.values) for value in alike
        ):
            return False
    return all(id(one.param) in before and torch.equal(before[id(one.param)], _few(one.param)) for one in elements)


def _lost_beside_fp32(optimizer: Any, number: int, elements: Sequence[_Elements]) -> tuple[list[Tensor], str]:
    """Return the parameters of a group of which fp32 would have moved more than half of what did not move.

    And in words, the share of the elements of the group that did not move.
    """
    counts, lost = [], []
    for one, wide in zip(elements, _stepped_in_fp32(optimizer, number, elements), strict=True):
        has_grad, stays, stays_in_fp32 = one.grad != 0, _few(one.param) == one.values, wide == one.values
        sets = (has_grad, has_grad & stays, has_grad & stays_in_fp32, has_grad & stays & ~stays_in_fp32)
        counts.append([int(each.sum()) for each in sets])
        if 2 * counts[-1][3] > counts[-1][0]:
            lost.append(one.param)
    total, unmoved, unmoved_in_fp32, _ = map(sum, zip(*counts, strict=True))
    elements_of = f"of the elements with a gradient in group {number}"
    return lost, f"{unmoved / total:.1%} {elements_of}, and in fp32 of {unmoved_in_fp32 / total:.1%}"


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
