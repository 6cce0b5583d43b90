"""Losses of half precision that make no inf: swallowed updates, rounded optimizer state, gradients summed in half.

They are looked for in steps 1, 4, 16, 64 and so on of each optimizer of torch's class. Other steps cost two calls in
Python. No result changes, and each kind of loss is told once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from autoamp.diagnostics import half_samples
from autoamp.diagnostics.tables import first_of
from autoamp.errors import warn_user
from autoamp.program import listen
from autoamp.scaling import is_sharded
from autoamp.stepping import named_params, stepped_params
from autoamp.tensors import HALF_DTYPES, dtype_name
from autoamp.torch_private import has_step_pre_hooks, undisturbed

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# A sum of 16 gradients in bf16 is off by 0.2 % as a rule, and by 6 % where the later ones are swallowed.
_LOST_OF_SUM = 0.01
# Below this part of its highest learning rate an optimizer has all but ended.
_LOW_LR = 0.1
# The sums of so many gradients are looked at.
_SUMS = 4
_MASTERS = 'Keep fp32 master weights (opt_level="O2" or FP16_Optimizer)'
_REMEDIES = {
    "updates": f"{_MASTERS}, or use an optimizer with stochastic rounding (torchao.optim, bf16_stochastic_round=True) "
    "or Kahan summation (optimi, kahan_sum=True)",
    "optimizer state": f"{_MASTERS}, whose state stays fp32, or copy the fp32 tensors into optimizer.state afterwards",
    "gradient sums": 'Use opt_level="O2", which sums the gradients of a step in fp32',
}


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
            held = half_samples.few_of_grad(self.param)
            if held is None or not held.any():
                self._error, self.passes = 0.0, 1
            elif self.param.grad is not None and self.param.grad.dtype in HALF_DTYPES:
                self._sum = held.add_(half_samples.few(grad))

    def _added(self, param: Tensor) -> None:
        """Called after the gradient was added."""
        if len(param._backward_hooks or ()) > 1 or len(param._post_accumulate_grad_hooks or ()) > 1:
            # A hook of the program may have changed it.
            self._sum = None
        if self._sum is not None:
            with contextlib.suppress(Exception), undisturbed():
                self._last = half_samples.few_of_grad(param)
                self._error = self._error + (self._last - self._sum)
                self.passes += 1


@dataclass
class _Steps:
    """The steps of one optimizer.

    Attributes:
        count: How many began.
        running: The frame that calls the running one. A class's own step may call that of its base.
        closure: Whether the running one makes or changes the gradients by itself.
        sample: Of the half parameters, if the step that runs is sampled.
        earlier: The sample before it, and the number of its step.
        sums: Those of the coming step, if that is to be sampled.
        saved: The parameter, the name and a few elements of each state that was loaded, until it is compared.
        rates: The highest and the last learning rate of each group, as far as they were sampled.
    """

    count: int = 0
    running: FrameType | None = None
    closure: bool = False
    sample: Sequence[half_samples.Elements] | None = None
    earlier: tuple[int, Sequence[half_samples.Elements]] | None = None
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
        steps = self._steps.get(optimizer)
        if steps is None:
            steps = self._steps[optimizer] = _Steps()
        caller = sys._getframe(1)
        if steps.running is not None and _is_within(steps.running, caller):
            return
        # A step that raised has no end.
        steps.running, steps.sample = caller, None
        steps.count += 1
        if steps.saved:
            self._tell(optimizer, steps, _state_losses)
        if is_sampled(steps.count):
            # A closure makes the gradients, and the program's own hooks may change them, after this.
            has_closure = any(map(callable, (*args[1:], *kwargs.values())))
            steps.closure = has_closure or has_step_pre_hooks(optimizer)
            self.seen.update(map(id, _half_params(optimizer)))
            self._tell(optimizer, steps, _losses_before)

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        steps = self._steps.get(optimizer)
        if steps is None or steps.running is not sys._getframe(1):
            return
        steps.running = None
        if steps.sample is not None:
            self._tell(optimizer, steps, self._lost_updates)
        if is_sampled(steps.count + 1) and not steps.sums:
            steps.sums = _found(_sums_of, optimizer)

    def _around_load(self, original: Callable[..., None]) -> Callable[..., None]:
        def load_state_dict(optimizer: Any, state_dict: Any) -> None:
            saved = _found(_fp32_state, optimizer, state_dict)
            original(optimizer, state_dict)
            steps = self._steps.setdefault(optimizer, _Steps())
            steps.saved = saved
            # What overrides this method may put the state back by itself: then the next step tells.
            if type(optimizer).load_state_dict is Optimizer.load_state_dict:
                self._tell(optimizer, steps, _state_losses)

        return load_state_dict

    def _lost_updates(self, optimizer: Any, steps: _Steps) -> Iterator[dict[str, Any]]:
        """Yield what was lost in a sampled step, after it."""
        sample, earlier = steps.sample or (), steps.earlier
        in_fp32 = half_samples.is_elementwise(optimizer)
        steps.sample = None
        # An optimizer may step at each so many calls alone, and the first samples are close together.
        steps.earlier = (steps.count, sample) if steps.count > 1 and not in_fp32 else None
        steady = {number for number, group in enumerate(optimizer.param_groups) if _is_steady(steps, number, group)}
        if getattr(optimizer, "grad_scale", None) is not None or bool(getattr(optimizer, "found_inf", False)):
            # A fused optimizer unscales by itself, and skips by itself.
            return
        for one in sample:
            one.grad = half_samples.few_of_grad(one.param) if one.grad is None else one.grad
        with_grad = [one for one in sample if one.grad is not None and bool(one.grad.any())]
        step = f"step {steps.count} of {type(optimizer).__name__}"
        for number, some in itertools.groupby(with_grad, lambda one: one.group):
            lost: list[Tensor] = []
            elements, found = list(some), ""
            if in_fp32:
                lost, share = half_samples.lost_beside_fp32(optimizer, number, elements)
                found = f"{step} changed no bit of {share}"
            elif earlier is not None and half_samples.are_unmoved(elements, earlier[1]):
                lost = [one.param for one in elements]
                found = f"no bit changed in group {number} from step {earlier[0]} to {step}, though it has gradients"
            if lost and number in steady:
                self.lost.update(map(id, lost))
                dtype, least = lost[0].dtype, f"1/{4 / torch.finfo(lost[0].dtype).eps:g}"
                swallows = f"in {dtype_name(dtype)} an update below {least} of a weight rounds away"
                sentence = f"{found}: {swallows}, as in {_names(optimizer, lost)}"
                yield _row("updates", optimizer, steps, sentence, number)

    def _tell(self, optimizer: Any, steps: _Steps, look: Callable[..., Iterable[dict[str, Any]]]) -> None:
        """Keep what a look finds, and warn of the first of each kind."""
        for row in _found(look, optimizer, steps):
            is_known = any(known["kind"] == row["kind"] for known in self.rows.values())
            self.rows[row["kind"], id(steps), row["group"]] = row
            if not is_known:
                warn_user(f"{row['sentence']}. {row['remedy']}")


def _found(look: Callable[..., Iterable[_T]], *args: Any) -> list[_T]:
    """Return what a look finds. Nothing intercepts what it does, and no exception of it ends the program."""
    found: list[_T] = []
    if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return found
    try:
        with undisturbed():
            found.extend(look(*args))
    except Exception:
        log.debug("a step could not be looked at", exc_info=True)
    return found


def _is_within(frame: FrameType, inner: FrameType | None) -> bool:
    """Whether a frame runs, and has called, directly or not, another one."""
    while inner is not None and inner is not frame:
        inner = inner.f_back
    return inner is frame


def is_sampled(step: int) -> bool:
    """Whether the step of this number, from 1, is 1, 4, 16, 64 and so on."""
    return step.bit_count() == 1 and step.bit_length() % 2 == 1


def _is_steady(steps: _Steps, number: int, group: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a group is neither that of a warm-up nor close to 0, and take note of it."""
    rate = float(group.get("lr", 1.0))
    highest, last = steps.rates.get(number, (0.0, 0.0))
    steps.rates[number] = max(highest, rate), rate
    return 0.0 < _LOW_LR * highest <= rate <= last


# -- what was lost, in rows --


def _losses_before(optimizer: Any, steps: _Steps) -> Iterator[dict[str, Any]]:
    """Yield what was lost before a sampled step, and take the sample of it."""
    steps.sample = half_samples.sample_of(optimizer, with_grads=not steps.closure)
    sums, steps.sums = steps.sums, ()
    for lost, one in sorted(((one.stop(), one) for one in sums), key=lambda pair: -pair[0])[:1]:
        if lost > _LOST_OF_SUM:
            yield _row(
                "gradient sums", optimizer, steps,
                f"{lost:.1%} of the gradient of {_names(optimizer, [one.param])} was lost as {one.passes} "
                f"backward passes added it up in {dtype_name(one.param.dtype)}, before step {steps.count}",
            )  # fmt: skip


def _state_losses(optimizer: Any, steps: _Steps) -> Iterator[dict[str, Any]]:
    """Yield what a load lost of the state."""
    saved, steps.saved = steps.saved, ()
    rounded = []
    for param, name, before in saved:
        value = optimizer.state[param].get(name)
        if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
            after = half_samples.few(value).to(before.device)
            if after.shape == before.shape and not torch.equal(after, before):
                rounded.append((param, name, before, after))
    if rounded:
        params, names, *elements = zip(*rounded, strict=True)
        saved_values, values = (torch.cat([one.cpu() for one in some]) for some in elements)
        changes = ((values - saved_values) / saved_values).abs()[(saved_values != 0) & saved_values.isfinite()]
        gone = (changes == 1) | changes.isinf()
        yield _row(
            "optimizer state", optimizer, steps,
            f"load_state_dict of {type(optimizer).__name__} rounded {', '.join(sorted(set(names)))} of "
            f"{_names(optimizer, params)} from float32 to {dtype_name(params[0].dtype)}: values changed by up "
            f"to {max(changes[~gone].tolist(), default=0.0):.2%}, and {float(gone.float().mean()):.1%} of "
            "them became 0 or inf",
        )  # fmt: skip


def _row(kind: str, optimizer: Any, steps: _Steps, sentence: str, group: int | None = None) -> dict[str, Any]:
    return {
        "kind": kind, "step": steps.count, "optimizer": type(optimizer).__name__, "group": group, "sentence": sentence,
        "remedy": _REMEDIES[kind],
    }  # fmt: skip


def _names(optimizer: Any, params: Sequence[Tensor]) -> str:
    """Return the names of the first of some parameters, and how many others there are."""
    wanted = {id(param) for param in params}
    names = [name for name, param in named_params(optimizer) if id(param) in wanted]
    return first_of(names, 3)


def _half_params(optimizer: Any) -> list[Tensor]:
    """Return the half parameters that an optimizer steps itself, without those of which this rank has no element."""
    return list(filter(half_samples.is_half, stepped_params(optimizer)))


def _sums_of(optimizer: Any) -> list[_GradientSum]:
    """Watch the sums of gradients of an optimizer's few smallest half parameters, which are vectors as a rule."""
    params = [one for one in _half_params(optimizer) if one.requires_grad and one.is_leaf and not is_sharded(one)]
    return [_GradientSum(param) for param in sorted(params, key=Tensor.numel)[:_SUMS]]


def _fp32_state(optimizer: Any, state_dict: Mapping[str, Any]) -> list[tuple[Tensor, str, Tensor]]:
    """Return a few elements of each fp32 state of half parameters in a state dict that is about to be loaded."""
    saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return [
        (param, name, half_samples.few(value))
        for key, param in zip(saved, stepped_params(optimizer), strict=False)
        if half_samples.is_half(param)
        for name, value in state_dict["state"].get(key, {}).items()
        if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
    ]
